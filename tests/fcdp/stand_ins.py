"""The parts of a topology, of a unit and of a gather that tiers and policies look at.

Ranks are threads of this process, whose messages are gloo's own: no process has to start.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fcdp.streams import Slice, Streams


class Uncounted(contextlib.nullcontext[None]):
    """Exchanges of ranks that never fail."""

    place = 0


class NoFailures:
    """Failures of ranks that never fail, or of threads of one process, which fail together."""

    exchanges = Uncounted()

    def part(self, *_: Any) -> Uncounted:
        return self.exchanges

    def completing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    alone = completing

    def backward_runs(self, *_: Any, **__: Any) -> None: ...

    begins = forward_ends = announce = cover = backward_runs

    def raise_out_of_step(self, who: str = "ranks") -> None:
        raise AssertionError("ranks are out of step")


CPU = torch.device("cpu")
STREAMS = Streams(CPU)


class Place:
    """A rank's place; its process groups, or what stands for them."""

    def __init__(
        self, nodes: int, node: int, ranks_per_node: int = 1, local_rank: int = 0, **groups: Any
    ) -> None:
        self.nodes, self.node = nodes, node
        self.ranks_per_node, self.local_rank = ranks_per_node, local_rank
        self.world_size = nodes * ranks_per_node
        self.rank = node * ranks_per_node + local_rank
        self.failures = NoFailures()
        self.exchanges = self.failures.exchanges
        stand_ins = {"reduce_intra": "intra of reductions", "reduce_inter": "inter of reductions"}
        vars(self).update({"intra": "intra", "inter": "inter", **stand_ins, **groups})


@dataclass(eq=False)
class StandInUnit:
    name: str
    shard_bytes: int
    reuses: int = 1
    params: tuple[Any, ...] = ()
    hooked: bool = False
    packed: tuple[int, ...] = ()
    topology: Any = field(default_factory=lambda: Place(2, 0))


def slice_of(rows: torch.Tensor, node: int = 0) -> Slice:
    """One row per node, this rank's own among them."""
    return Slice(rows, node, STREAMS.current())


#: Longer than a busy machine takes, and short where a rank waits for one that has failed.
_TIMEOUT = timedelta(seconds=20)


def on_threads(nodes: int, ranks_per_node: int, act: Callable[[Any], Any]) -> list[Any]:
    """Call ``act`` with each rank's topology, at the same time; return what each returned."""
    store = dist.HashStore()

    def group(name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # type: ignore[attr-defined]
        options._timeout, options._threads = _TIMEOUT, 1
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[call-arg]

    def call(rank: int) -> Any:
        node, local_rank = divmod(rank, ranks_per_node)
        groups = {}
        for kind in ("", "reduce_", "control_"):
            groups[f"{kind}intra"] = group(f"{kind}intra {node}", local_rank, ranks_per_node)
            groups[f"{kind}inter"] = group(f"{kind}inter {local_rank}", node, nodes)
        return act(Place(nodes, node, ranks_per_node, local_rank, **groups))

    with ThreadPoolExecutor(nodes * ranks_per_node) as pool:
        return [*pool.map(call, range(nodes * ranks_per_node))]


class OwnAllGather:
    """An all-gather as FSDP2 takes it; counts what it was called for."""

    def __init__(self) -> None:
        self.allocated, self.groups = 0, set[int]()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.groups.add(group.size())
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
