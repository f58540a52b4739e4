"""Counts of bytes by link and phase, and of writes; and ranges in a profiler's timeline."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from fcdp.sizes import in_words

Link = Literal["inter_node", "intra_node", "host_to_device", "device_to_host", "disk"]
Phase = Literal["forward", "backward", "reduce"]

_NOTHING: AbstractContextManager[Any] = nullcontext()

#: Links as people read them, slowest first.
_NAMES: dict[Link, str] = {
    "inter_node": "between nodes",
    "intra_node": "inside the node",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "disk": "disk",
}


@dataclass(repr=False)
class Ledger:
    """Payload bytes of one rank since the last ``reset``, without the transport's framing.

    ``inter_node`` and ``intra_node`` count what this rank sends to other ranks. A node's egress is
    the sum over its ranks, which by symmetry is ``ranks_per_node`` times one rank's; of a flat
    exchange each rank counts its share of what the node sends.
    ``host_to_device`` and ``device_to_host`` count reads from and writes to the host cache and the
    disk's buffers; on a CPU run these are copies in memory. ``disk`` counts what the disk tier was
    given and what was asked of it.

    Attributes:
        bytes: ``bytes[link][phase]``, with phases forward, backward and reduce.
        hits: Gathers served from the cache.
        misses: Gathers that crossed nodes.
        host_cache_bytes: Host memory that this rank's cache holds; page-locked on CUDA.
        device_cache_bytes: Device memory that it holds.
        host_partials_bytes: Host memory of partial gradients (``CommOptions.partial_gradients``).
        pending_bytes: Partial gradients in device memory that wait for the last micro-batch
            (``fcdp.accumulate``).
        peak_pending_bytes: The most of these since ``reset``.
        residual_bytes: What error feedback keeps of reductions, in device memory.
        reduce_dtypes: Names of the dtypes that gradients have been reduced in so far. Where
            ``MixedPrecisionPolicy`` names none, it is the dtype that parameters are gathered in
            before torch 2.15, and from 2.15 on the parameters' own.

    Example:
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> print(repr(fcdp.ledger(model)).split(";")[1])
         2 hits, 2 misses)
    """

    bytes: dict[Link, dict[Phase, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    hits: int = 0
    misses: int = 0
    host_cache_bytes: int = 0
    device_cache_bytes: int = 0
    host_partials_bytes: int = 0
    pending_bytes: int = 0
    peak_pending_bytes: int = 0
    residual_bytes: int = 0
    reduce_dtypes: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        links = ", ".join(
            f"{_NAMES[link]} {in_words(self.total(link))}" for link in _NAMES if link in self.bytes
        )
        return f"Ledger({links or 'no bytes'}; {self.hits} hits, {self.misses} misses)"

    def table(self) -> str:
        """Counts and memory as lines of text, for people.

        Returns:
            A table of links and phases, and lines of what is held.

        Example:
            >>> print(fcdp.ledger(model).table().splitlines()[0])
            bytes of this rank  forward  backward  reduce  total
        """
        phases = get_args(Phase)
        rows = [["bytes of this rank", *phases, "total"]]
        for link in (link for link in _NAMES if link in self.bytes):
            counts = [self.bytes[link].get(phase, 0) for phase in phases]
            shown = (in_words(count) if count else "–" for count in [*counts, sum(counts)])
            rows.append([_NAMES[link], *shown])
        # Columns stand under each other, the first on the left and others on the right.
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows
        ]
        served = self.hits + self.misses
        share = f" ({self.hits / served:.0%} of gathers)" if served else ""
        lines.append(f"hits {self.hits}{share}, misses {self.misses}")
        if self.reduce_dtypes:
            lines.append(f"gradients reduced in {', '.join(sorted(self.reduce_dtypes))}")
        held = {
            "cache on the host": self.host_cache_bytes,
            "cache on the device": self.device_cache_bytes,
            "partial gradients on the host": self.host_partials_bytes,
            "partial gradients, at most": self.peak_pending_bytes,
            "residuals": self.residual_bytes,
        }
        lines += [f"{name} {in_words(nbytes)}" for name, nbytes in held.items() if nbytes]
        return "\n".join(lines)

    def add(self, link: Link, phase: Phase, count: int) -> None:
        self.bytes[link][phase] += count

    def add_both(self, phase: Phase, across: int, inside: int) -> None:
        """Count an exchange of all ranks: what goes to other nodes, and stays inside this one."""
        self.add("inter_node", phase, across)
        self.add("intra_node", phase, inside)

    def hold(self, count: int) -> None:
        """Account for ``count`` more bytes of partial gradients (negative: released)."""
        self.pending_bytes += count
        self.peak_pending_bytes = max(self.peak_pending_bytes, self.pending_bytes)

    def total(self, link: Link) -> int:
        """Bytes of one link in all phases.

        Args:
            link: Such as ``"inter_node"``.

        Returns:
            A count of bytes; 0 for a link that nothing used.

        Example:
            >>> fcdp.ledger(model).total("disk")
            0
        """
        return sum(self.bytes[link].values())

    def snapshot(self) -> dict[str, dict[str, int]]:
        """A plain copy of ``bytes``.

        Returns:
            Bytes by link and phase.

        Example:
            >>> fcdp.ledger(model).snapshot()  # before a step
            {}
        """
        return {
            link: {phase: count for phase, count in phases.items()}  # noqa: C416 - the key's type
            for link, phases in self.bytes.items()
        }

    def reset(self) -> None:
        """Start a new window of counts; what is held stays.

        Example:
            >>> model(torch.ones(1, 8)).sum().backward()
            >>> fcdp.ledger(model).reset()
            >>> fcdp.ledger(model).misses
            0
        """
        self.bytes.clear()
        self.hits = self.misses = 0
        self.peak_pending_bytes = self.pending_bytes


def writes(params: Sequence[DTensor]) -> int:
    """Count the in-place writes to this rank's shards that autograd sees.

    Writes through the parameter count on the DTensor, writes through ``to_local()`` on the tensor
    inside.
    """
    count = 0
    for param in params:  # a gather asks: no list, no generator
        count += param._version + param._local_tensor._version
    return count


def in_backward() -> bool:
    # The same test that torch.utils.checkpoint uses to tell a recomputation from a forward.
    return torch._C._current_graph_task_id() != -1


def profiled(part: str, of: str = "") -> AbstractContextManager[Any]:
    """Name what the body does ``fcdp::part of``, if a profiler runs: names cost more than it."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return record_function(f"fcdp::{part} {of}".rstrip())
