"""Description of a strategy: who builds it, what it needs, how it trains and looks.

Imports no engine, for programs that must not wait for torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from baselines import pins
from baselines.pins import Pin
from baselines.schedule import Schedule
from baselines.settings import Settings

Engine = Literal["ddp", "fsdp2", "fcdp", "deepspeed", "pipeline", "co2", "cyclic", "luwu", "fuyou"]
#: Engines in the order of preference: what PyTorch ships, this library, another framework.
ENGINES: tuple[Engine, ...] = get_args(Engine)
#: Whether a strategy trains as FSDP2 does but for the order of sums, within what quantisation
#: loses, or by an optimization of its own.
Numerics = Literal["exact", "bounded", "own"]


@dataclass(frozen=True)
class Look:
    """A strategy in figures: hex colour and Matplotlib's marker."""

    colour: str
    marker: str


@dataclass(frozen=True)
class ExtraProcess:
    """A process that a strategy needs beside its ranks, on a machine of its own.

    Its function finds its own address in ``FCDP_<NAME>``, as the ranks and other such processes do,
    and a secret that all processes of the launch share in ``FCDP_RUN_SECRET``.
    """

    name: str
    #: "package.module:function", called without arguments.
    entry: str
    #: Whether it is a part of the network: it has no link of its own, but those of the others limit
    #: it in both directions.
    in_network: bool = False


@dataclass(frozen=True)
class Strategy:
    """A strategy, built by a function of a module of this folder."""

    name: str
    engine: Engine
    what: str
    #: ``None``: it is not simulated, nor is anything promised of its bytes.
    schedule: Schedule | None
    look: Look | None = None
    numerics: Numerics = "exact"
    #: The type of what a cell may choose for it.
    settings: type[Settings] = Settings
    #: The module here and its function, or class, that build it. ``None``: ``build`` of the module
    #: of its name, with ``_`` for ``-``.
    built_by: str | None = None
    #: The name that readers of tables and figures know, if it is another one.
    title: str | None = None
    #: Operations of its engine that need CUDA and NCCL; ``None`` if a CPU over gloo will do.
    needs_cuda: str | None = None
    #: Why it is for CPUs over gloo alone; ``None`` if an accelerator will do too.
    cpu_only: str | None = None
    #: Builders of operators that its engine compiles at their first use, beside those of all.
    operators: tuple[str, ...] = ()
    #: Processes beside the ranks, which the cluster starts and ends with them.
    extra: tuple[ExtraProcess, ...] = ()
    #: A header that an operator of its engine is compiled with, and the package that has it.
    needs_header: tuple[Path, str] | None = None

    @property
    def builder(self) -> tuple[str, str]:
        """The names of the module that builds the strategy, and of its function."""
        module, _, function = (self.built_by or self.name.replace("-", "_")).partition(":")
        return f"baselines.{module}", function or "build"

    @property
    def label(self) -> str:
        return self.title or self.name

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints hold what it trains: FSDP2 shards it, with a cache or without."""
        return self.is_published or self.engine in ("fsdp2", "pipeline")

    @property
    def is_published(self) -> bool:
        """Whether ``fcdp.publish`` can write what it trains: it is built over FCDP's cache."""
        return self.builder == ("baselines.presets.fcdp", "build")

    @property
    def has_policy(self) -> bool:
        """Whether it caches by a policy, which its cells may choose."""
        return "policy" in self.settings.model_fields

    @property
    def fixes(self) -> dict[str, str]:
        """The policy and codecs that it fixes, by the name of the setting."""
        names = ("policy", "gather_codec", "reduce_codec")
        fixed = {name: getattr(self.schedule, name, None) for name in names}
        return {name: value for name, value in fixed.items() if value is not None}

    def chosen(self, values: Mapping[str, Any]) -> Settings:
        """Settings of the strategy: those among ``values``, defaults for the others.

        Raises pydantic's ``ValidationError`` for a value outside of its setting's range.
        """
        own = {name: value for name, value in values.items() if name in self.settings.model_fields}
        return self.settings.model_validate(own, strict=True)

    def engine_version(self, deepspeed: Pin = "current") -> str | None:
        """The version of the engine's package; ``None`` if it is not installed."""
        return pins.version(deepspeed) if self.engine == "deepspeed" else metadata.version("torch")
