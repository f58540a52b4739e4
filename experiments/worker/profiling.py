"""One more step of a cell under torch's profiler: a trace per rank, and a summary of exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fcdp import Topology

#: Of the cell's directory.
FOLDER = "profile"
SUMMARY = "communication.md"
#: What exchanges are called: in the library, in ``torch.distributed``, in its backends.
_EXCHANGES = ("fcdp::", "c10d::", "gloo:", "nccl:", "record_param_comms")


@dataclass
class _Exchanges:
    """Calls and microseconds of one rank, by name."""

    calls: Counter[str] = field(default_factory=Counter)
    microseconds: Counter[str] = field(default_factory=Counter)


def profile_step(
    step: Callable[[], object],
    sent_bytes: Callable[[], int],
    take_ledger: Callable[[], Mapping[str, Mapping[str, float]] | None],
    topology: Topology,
    output: Path,
) -> None:
    """Profile ``step`` on every rank. Collective; nothing that was measured before knows of it.

    Each rank writes ``profile/rank<r>.json.gz`` in ``output`` on its own node, for Perfetto or
    chrome://tracing, and rank 0 ``communication.md``: calls and time by name, bytes by link.
    ``sent_bytes`` reads what this node has sent so far while no rank sends.
    """
    folder = output / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if topology.mesh.device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    take_ledger()
    before = sent_bytes()
    with profile(activities=activities) as profiler:
        step()
    sent = sent_bytes() - before
    profiler.export_chrome_trace(str(folder / f"rank{topology.rank}.json.gz"))
    ranks: list[Any] = [None] * topology.world_size
    dist.all_gather_object(ranks, _exchanges(profiler))
    if topology.rank == 0:
        ledger = take_ledger()
        (folder / SUMMARY).write_text(_summary(ranks, sent, ledger or {}), encoding="utf-8")


def _exchanges(profiler: profile) -> _Exchanges:
    """By name, without the unit that the library's own names end in."""
    found = _Exchanges()
    for event in profiler.events() or ():
        if event.name.startswith(_EXCHANGES):
            name = event.name.split()[0]
            found.calls[name] += 1
            found.microseconds[name] += event.cpu_time_total
    return found


def _summary(ranks: list[_Exchanges], sent: int, ledger: Mapping[str, Mapping[str, float]]) -> str:
    lines = [
        "# Communication of one step",
        "",
        "Time on the host from start to end of each range, which for what runs in the background "
        "is the time to start it. The mean over ranks, and the most of any.",
        "",
        "| Range | Calls per rank | ms | ms, at most |",
        "|---|--:|--:|--:|",
    ]
    for name in sorted({name for rank in ranks for name in rank.calls}):
        calls = sum(rank.calls[name] for rank in ranks) / len(ranks)
        times = [rank.microseconds[name] / 1e3 for rank in ranks]
        mean = sum(times) / len(times)
        lines.append(f"| {name} | {calls:g} | {mean:.3f} | {max(times):.3f} |")
    lines += ["", f"Node 0 sent {sent / 1e6:.3f} MB to other nodes, by the kernel's counters."]
    if ledger:
        lines += ["", "| Link, of one node | Phase | MB |", "|---|---|--:|"]
        lines += [
            f"| {link.replace('_', ' ')} | {phase} | {count / 1e6:.3f} |"
            for link, phases in ledger.items()
            for phase, count in phases.items()
        ]
    return "\n".join(lines) + "\n"
