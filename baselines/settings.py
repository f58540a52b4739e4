"""Settings of cells: how cells that differ in one are compared and shown, and who has which.

A field says it once, where it is declared: ``Annotated[int, Setting("Sequence")]``. What belongs to
some strategies only is a field of their own type of settings. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from baselines.encoding import EXPONENTS
from baselines.pins import Pin
from fcdp.sizes import parse

#: ``condition``: cells are compared only where it is alike. ``subject``: it is what is compared.
#: ``incidental``: it changes nothing of what a step is.
Role = Literal["condition", "subject", "incidental"]
#: Where cells that differ in it stand: ``run`` and ``training`` in figures of their own, ``model``
#: in panels of one figure, ``axis`` in one panel. Tables sort by these in this order.
Place = Literal["run", "model", "training", "axis"]
#: ``later``: it came after the first records; where it has its default, ids are as they were.
InId = Literal["always", "later", "never"]


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Setting:
    """Description of a cell's field, in its annotation."""

    #: The name that readers see.
    label: str
    role: Role = "condition"
    place: Place = "training"
    in_id: InId = "always"
    #: Whether cells that differ in it train on other batches or other parameters, so that their
    #: losses say nothing of one another.
    learns: bool = False
    #: Whether all tables and headings show it, and not only those whose cells differ in it.
    always: bool = False
    #: A value in words.
    write: Callable[[Any], str] = _plain


#: A setting of the subject: cells that differ in it are compared.
_subject = partial(Setting, role="subject")


def _either(yes: str, no: str) -> Callable[[object], str]:
    """How a setting is written that is on or off."""
    return lambda value: yes if value else no


class Strict(BaseModel):
    """A type that allows nothing unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Strict):
    """Choices that a strategy leaves to a cell beside what all cells have: here none."""


#: Cache policy, as ``fcdp.cache.named`` reads it.
Policy = Annotated[str, _subject("Policy", in_id="later")]
#: Codec between nodes, as ``baselines.encoding`` reads it; a strategy with one of its own allows
#: ``none`` alone.
GatherCodec = Annotated[str, _subject("Gather codec", in_id="later", write="gather {}".format)]
ReduceCodec = Annotated[str, _subject("Reduce codec", in_id="later", write="reduce {}".format)]
ErrorFeedback = Annotated[
    bool, _subject("Error feedback", in_id="later", write=lambda _: "error feedback")
]
#: How gathers and reductions cross nodes. ``hierarchical``: inside the node and across apart, and
#: gradients once per step. ``undeferred``: so too, and gradients of each micro-batch. ``flat``: in
#: one ring over all ranks, which carries whole values only, and gradients of each micro-batch.
Exchanges = Literal["hierarchical", "undeferred", "flat"]
CellExchanges = Annotated[
    Exchanges, _subject("Exchanges", in_id="later", write="{} exchanges".format)
]
#: Which of DeepSpeed's pins, as ``baselines.pins`` has them.
DeepSpeedPin = Annotated[Pin, _subject("DeepSpeed", in_id="later")]


def _feeds_back_a_loss(value: bool, info: ValidationInfo) -> bool:
    if value and info.data.get("reduce_codec") in ("none", *EXPONENTS):
        raise ValueError("needs a reduce_codec that rounds, whose loss it feeds back")
    return value


def _is_not_fixed(value: str, info: ValidationInfo) -> str:
    fixed = (info.context or {}).get("fixed", {}).get(info.field_name)
    if fixed is not None and value != "none":
        raise ValueError(f"allowed is none: the strategy has its own, {fixed}, in any case")
    return value


def _carry_whole_values(value: str, info: ValidationInfo) -> str:
    for name in ("gather_codec", "reduce_codec"):
        if value == "flat" and info.data.get(name, "none") != "none":
            raise ValueError(f"allowed with another {name} than none: hierarchical, undeferred")
    return value


class PaperSettings(Settings):
    """Settings of the FCDP paper's own system."""

    policy: Policy = "host"


class _CodecSettings(Settings):
    """Codecs between nodes, of strategies over this library."""

    gather_codec: GatherCodec = "none"
    reduce_codec: ReduceCodec = "none"
    error_feedback: ErrorFeedback = False

    _error_feedback = field_validator("error_feedback")(_feeds_back_a_loss)

    @model_validator(mode="before")
    @classmethod
    def _without_adapters(cls, given: Any) -> Any:
        """In records from when adapters could be replicated all have sharded ones."""
        if isinstance(given, dict) and given.get("adapters") == "sharded":
            return {name: value for name, value in given.items() if name != "adapters"}
        return given


class CacheSettings(_CodecSettings, PaperSettings):
    """Settings of FCDP."""

    exchanges: CellExchanges = "hierarchical"

    _exchanges = field_validator("exchanges")(_carry_whole_values)


class EncodedSettings(_CodecSettings):
    """Settings of strategies over this library that fix where parameters are cached."""

    _codecs = field_validator("gather_codec", "reduce_codec")(_is_not_fixed)


#: Whether forwards before a step, as those of generation, gather for each, or once for all.
Forwards = Annotated[
    Literal["gathered", "unsharded"],
    _subject("Forwards", in_id="later", write="{} forwards".format),
]


class FSDP2Settings(Settings):
    """Settings of FSDP2 itself."""

    forwards: Forwards = "gathered"


class DeepSpeedSettings(Settings):
    """Settings of DeepSpeed's strategies."""

    deepspeed: DeepSpeedPin = "current"


_Count = Annotated[int, Field(ge=1)]
#: Steps between two exchanges: the paper's τ.
Interval = Annotated[_Count, _subject("Interval", write="τ = {}".format)]
#: Who trains apart: each rank; each node, over whose ranks FSDP2 shards the model; or several, over
#: whose ranks FCDP does.
Worker = Annotated[
    Literal["rank", "node", "nodes"],
    _subject(
        "Worker",
        write=lambda value: "FCDP inside workers" if value == "nodes" else f"a worker per {value}",
    ),
]
NodesPerWorker = Annotated[
    _Count, _subject("Nodes per worker", in_id="later", write="{} nodes per worker".format)
]
#: Where the outer state and the snapshot lie.
OuterPlace = Literal["device", "host"]
OuterOn = Annotated[
    OuterPlace, _subject("Outer state on", in_id="later", write="outer state on the {}".format)
]
#: How much of the mean displacement a worker follows: CO2's α.
OuterLearningRate = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    _subject("Outer learning rate", write="α = {:g}".format),
]
#: CO2's β.
OuterMomentum = Annotated[
    float, Field(ge=0, lt=1), _subject("Outer momentum", write="β = {:g}".format)
]
#: Whether displacements count in units of the learning rate, as SlowMo has it.
ByLearningRate = Annotated[
    bool,
    _subject(
        "By learning rate", write=_either("displacements ÷ learning rate", "plain displacements")
    ),
]
#: The largest outer momentum of an element: the paper's φ; ``None``: as large as it is.
Clip = Annotated[
    Annotated[float, Field(gt=0)] | None,
    _subject("Clip", write=lambda value: "no clipping" if value is None else f"φ = {value:g}"),
]
#: Divisor of a late displacement; see ``baselines.co2.train``.
Penalty = Annotated[
    Literal["none", "first-step", "first-steps"], _subject("Penalty", write="penalty {}".format)
]


def divided(parts: int, whole: int) -> str | None:
    """Why nodes cannot be grouped by so many; ``None`` if they can."""
    if whole % parts == 0:
        return None
    allowed = [str(size) for size in range(1, whole + 1) if whole % size == 0]
    return f"must divide the cluster's {whole} nodes; allowed are {', '.join(allowed)}"


class LocalSGDSettings(Settings):
    """Settings of Local SGD."""

    interval: Interval = 12
    worker: Worker = "rank"
    nodes_per_worker: NodesPerWorker = 1
    outer_on: OuterOn = "device"

    @field_validator("nodes_per_worker")
    @classmethod
    def _divides_the_nodes(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("worker") != "nodes":
            raise ValueError(f"allowed is 1 where worker is {info.data.get('worker')}, not nodes")
        nodes = (info.context or {}).get("nodes")
        if isinstance(nodes, int) and (problem := divided(value, nodes)):
            raise ValueError(problem)
        return value


class SlowMoSettings(LocalSGDSettings):
    """Settings of SlowMo; its paper's momentum of language models."""

    outer_learning_rate: OuterLearningRate = 1.0
    outer_momentum: OuterMomentum = 0.5
    by_learning_rate: ByLearningRate = True


class CO2Settings(SlowMoSettings):
    """Settings of CO2; momentum and clip are those of its authors' run of GPT-2 medium."""

    outer_momentum: OuterMomentum = 0.2
    by_learning_rate: ByLearningRate = False
    clip: Clip = 1.0
    penalty: Penalty = "first-steps"


class DiLoCoSettings(LocalSGDSettings):
    """Settings of DiLoCo; its outer step is Nesterov's, with its paper's rate and momentum."""

    outer_learning_rate: OuterLearningRate = 0.7
    outer_momentum: OuterMomentum = 0.9


class StreamingSettings(DiLoCoSettings):
    """Settings of Streaming DiLoCo; the steps and the share are its paper's."""

    #: Fragments of the model, one after another of which crosses; blocks are dealt to them in turn.
    fragments: Annotated[_Count, _subject("Fragments", write="{} fragments".format)] = 2
    #: Steps that are trained while a fragment crosses.
    overlap: Annotated[_Count, _subject("Overlap", write="{} steps of overlap".format)] = 1
    #: Share of its own parameters that a worker keeps when a fragment arrives.
    kept: Annotated[float, Field(ge=0, lt=1), _subject("Kept", write="{:g} kept".format)] = 0.5

    @field_validator("fragments", "overlap")
    @classmethod
    def _is_within_the_interval(cls, value: int, info: ValidationInfo) -> int:
        interval = info.data.get("interval", value)
        if value > interval:
            raise ValueError(f"must be at most the interval, {interval}")
        return value


#: How old parameters may be, as ``baselines.cyclic.routes`` has it.
UpdateRule = Literal["v1", "v2"]


class CyclicSettings(Settings):
    """Settings of Cyclic Data Parallelism."""

    #: Which parameters a micro-batch may find one step old, as ``baselines.cyclic.routes`` has it.
    rule: Annotated[UpdateRule, _subject("Update rule", write="CDP-{}".format)] = "v2"
    #: Parts of the model with an optimizer each; ``None``: as many as ranks, as the paper has it.
    stages: Annotated[
        _Count | None,
        _subject(
            "Stages", write=lambda value: "a stage per rank" if value is None else f"{value} stages"
        ),
    ] = None


class LuWuSettings(Settings):
    """Settings of LuWu."""

    #: Threads of the server's optimizer: one each reads, casts and writes, the others step.
    threads: Annotated[
        int, Field(ge=4), _subject("Server threads", write="{} server threads".format)
    ] = 4
    #: Bytes of one message.
    chunk_bytes: Annotated[
        int,
        Field(ge=4096, le=4 * 2**20, multiple_of=4096),
        _subject("Chunk", write=lambda value: f"chunks of {value // 1024} KiB"),
    ] = 256 * 1024
    #: Whether a thread of the server does one thing for all layers, or all for one layer.
    pipeline: Annotated[
        Literal["step", "layer"], _subject("Pipeline", write="{}-centric".format)
    ] = "step"
    #: Whether the switch merges the workers' acknowledgements.
    merged: Annotated[
        bool,
        _subject(
            "Acknowledgements", write=_either("merged acknowledgements", "single acknowledgements")
        ),
    ] = True
    #: Whether frozen parameters are pulled once, and then kept in the worker's host memory.
    cached: Annotated[
        bool,
        _subject(
            "Frozen layers", write=_either("frozen layers cached", "frozen layers pulled each time")
        ),
    ] = False


#: When the optimizer steps, as ``baselines.fuyou.optimizer`` has it.
Update = Literal["after", "overlapped", "delayed"]


def _is_a_size(value: str) -> str:
    parse(value, least=1)
    return value


def _is_an_amount(value: str) -> str:
    if value not in ("auto", "none", "all"):
        try:
            _is_a_size(value)
        except ValueError as error:
            raise ValueError(f"{error}; and auto, none, all") from error
    return value


class FuyouSettings(Settings):
    """Settings of Fuyou."""

    #: Host memory for all that the strategy keeps there.
    dram_budget: Annotated[
        str, AfterValidator(_is_a_size), _subject("DRAM", write="{} of DRAM".format)
    ] = "1 GiB"
    #: Memory of the device; where that is the CPU, all beyond what the process has without a model.
    device_budget: Annotated[
        str, AfterValidator(_is_a_size), _subject("Device", write="{} on device".format)
    ] = "1 GiB"
    #: Blocks that are on the device at once.
    blocks_on_device: Annotated[
        int, Field(ge=2), _subject("Blocks on device", write="{} blocks on device".format)
    ] = 3
    update: Annotated[Update, _subject("Optimizer step", write="{}".format)] = "delayed"
    #: Bytes of matrix products that are kept instead of computed again: as many as the cost model
    #: chooses, none, all, or so many.
    swap: Annotated[
        str, AfterValidator(_is_an_amount), _subject("Swapped", write="swap {}".format)
    ] = "auto"
    #: The folder in which a run makes its own; ``None``: that of temporary files.
    ssd: Annotated[str | None, Setting("SSD", "incidental", in_id="never")] = None
    #: Bytes a second each way that the folder's disk is limited to, by control groups.
    ssd_limit: Annotated[
        _Count | None,
        _subject(
            "SSD limit",
            place="axis",
            write=lambda value: "SSD as it is" if value is None else f"SSD {value / 1e6:g} MB/s",
        ),
    ] = None
