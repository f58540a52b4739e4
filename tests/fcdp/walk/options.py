"""How a walk's model is made, sharded, cached and optimized: drawn from its seed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

import fcdp
from fcdp.exchange import ExchangeKind
from fcdp.grouping import PartialsChoice

SHAPES = [(2, 1), (2, 2), (3, 1)]

#: Policies by name; the path is a directory of the walk's own.
POLICIES: dict[str, Callable[[Path], fcdp.CachePolicy]] = {
    "none": lambda path: fcdp.NoCache(),
    "device": lambda path: fcdp.DeviceCache(),
    "host": lambda path: fcdp.HostCache(),
    "disk": lambda path: fcdp.DiskCache(path),
    "threshold": lambda path: fcdp.Threshold(0.5),
    "budget": lambda path: fcdp.Budget(device=700, host=700, disk=700, directory=path),
    "auto": lambda path: fcdp.Auto(measured_gathers=2),
}

OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.25),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5),
    # A large rate makes a stale parameter show at once.
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.03, foreach=False),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.03, foreach=True),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=0.03, fused=True),
}


@dataclass(frozen=True)
class Options:
    """One walk's setting; the defaults are the plainest."""

    nodes: int = 2
    ranks_per_node: int = 1
    #: By ``fcdp.shard``, or by ``fully_shard`` and then ``fcdp.cache_parameters``.
    setup: Literal["shard", "cache"] = "cache"
    policy: str = "host"
    blocks: int = 2
    width: int = 4
    tied: bool = False
    twice: bool = False
    checkpointing: bool = False
    #: 0: no adapters, everything is trained; otherwise all but adapters start frozen.
    adapter_rank: int = 0
    #: Whether the first block starts frozen.
    frozen: bool = False
    reshard_after_forward: bool | None = None
    look_ahead: int = 1
    partials: PartialsChoice = "device"
    verify: bool = False
    poison: bool = False
    optimizer: str = "sgd"
    set_to_none: bool = True
    divide_factor: float | None = None
    detect_writes: bool = True
    #: How what crosses nodes is coded, without loss: differences of gathers by this rule, and parts
    #: of reductions; ``None``: not at all.
    coding: Literal["always", "smallest"] | None = None
    exchanges: ExchangeKind = "hierarchical"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def unit(self) -> float:
        """The unit of all gradients: FSDP2 divides by the ranks, which must be exact."""
        return 2.0**-24 * (1 if self.world_size % 3 else 3)

    @property
    def caching(self) -> dict[str, Any]:
        """Arguments of ``fcdp.shard`` and ``fcdp.cache_parameters`` alike."""
        coding = self.coding
        return {
            "cache": fcdp.CacheOptions(
                look_ahead=self.look_ahead,
                detect_writes=self.detect_writes,
                verify=self.verify,
                poison=self.poison,
            ),
            "comm": fcdp.CommOptions(
                gather_codec=None if coding is None else fcdp.Delta(coding),
                reduce_codec=None if coding is None else fcdp.Exact("always"),
                exchanges=self.exchanges,
                partial_gradients=self.partials,
            ),
        }

    def trains_at_first(self, name: str) -> bool:
        if self.adapter_rank:
            return "adapter" in name
        return not (self.frozen and name.startswith("blocks.0."))

    def __str__(self) -> str:
        default = Options()
        changed = (
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value != getattr(default, name)
        )
        return f"Options({', '.join(changed)})"


def draw_options(seed: int) -> Options:
    """Options of a seed; shapes in turn, so that each third of the seeds has one."""
    random = Random(f"options {seed}")
    nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    setup = random.choice(["shard", "cache"])
    adapter_rank = random.choice([0, 0, 1, 3])
    options = Options(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        setup="shard" if setup == "shard" else "cache",
        policy=random.choice([*POLICIES, "host", "host"]),
        blocks=random.choice([2, 2, 3]),
        width=random.choice([4, 6, 9]),
        tied=random.random() < 0.3,
        twice=random.random() < 0.3,
        checkpointing=random.random() < 0.3,
        adapter_rank=adapter_rank,
        frozen=random.random() < 0.25,
        reshard_after_forward=random.choice([None, True, True, False]),
        look_ahead=random.choice([0, 1, 1, 2]),
        partials=random.choice(["device", "host"]),
        verify=random.random() < 0.25,
        poison=random.random() < 0.25,
        optimizer=random.choice([*OPTIMIZERS]),
        set_to_none=random.random() < 0.6,
        divide_factor=random.choice([None, None, None, 1.0, 8.0]),
        coding=random.choice([None, None, "always", "smallest"]),
    )
    if options.partials == "host" or options.coding is not None:
        return options
    # Reductions with each micro-batch, in one ring or not, take the place of sums in turn.
    return replace(options, exchanges="flat") if seed % 2 else replace(options, partials="each")
