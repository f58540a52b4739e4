"""Cost of one unit's gather and reduction for the host, on groups whose other ranks are imitated.

python -m scripts.host_cost            measure, and print the tables of results/tables.md
python -m scripts.host_cost --write    measure and write the record, for scripts.readme

The library's accelerator path runs on the CPU: collectives instead of messages, an accelerator's
checksums, and streams, which order nothing there. An accelerator widens a checksum's words in the
kernel that multiplies them, as results/gpu/trace.json.gz shows, and the CPU in a copy, an operation
more: here words are as wide as their keys. A collective takes its lists of tensors through
the binding and the dispatcher and moves nothing. Other work on the machine slows FSDP2's own calls
too: results are multiples of these, turn by turn.
"""

import contextlib
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

import fcdp
from analysis import text
from experiments.records import provenance
from fcdp.engine import Engine, engine_of
from scripts import fake_world

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "results" / "host-cost" / "record.json"
#: Nodes, and ranks per node: 16, 128, 512 and 1024 ranks.
SHAPES = ((2, 8), (16, 8), (64, 8), (128, 8))
UNITS = 8
#: Elements of each rank's shard: so few that copies take a microsecond or two.
ELEMENTS = 64
#: Rounds over all units, in turns of all paths, in processes one after another: these differ by
#: more than the turns of one do.
ROUNDS, TURNS, PROCESSES = 10, 10, 9
PATHS = {
    "gather, stale": "all-gather, entry stale",
    "gather, fresh": "all-gather, entry in the host cache",
    "reduce": "reduce-scatter",
    "FSDP2 gather": "FSDP2's all-gather",
    "FSDP2 reduce": "FSDP2's reduce-scatter",
}
#: FSDP2's path that each is compared with.
PLAIN = {name: f"FSDP2 {name.removeprefix('FSDP2 ').partition(',')[0]}" for name in PATHS}
#: Collectives issued, by the group that they ran in.
Counts = dict[str, int]


class Collectives:
    """Counts collectives by their group; they move nothing."""

    def __init__(self) -> None:
        self.issued: Counter[int] = Counter()  # by id of the group

    def named(self, topology: fcdp.Topology) -> Counts:
        """Operations issued since the last call, by group."""
        names = {
            id(topology.mesh.get_group()): "all ranks",
            id(topology.intra): "intra-node",
            id(topology.inter): "inter-node",
        }
        counts = {names[group]: count for group, count in self.issued.items()}
        self.issued.clear()
        return dict(sorted(counts.items()))

    @contextlib.contextmanager
    def in_place_of_torchs(self) -> Iterator[None]:
        """Replace process groups' collectives in the body.

        Each becomes an all-reduce of the same tensors, which the fake group answers at once: its
        gathers and reductions would copy each rank's part, in the host's time.
        """
        issued = self.issued

        def single(group: Any, output: torch.Tensor, tensor: torch.Tensor, *_: Any) -> dist.Work:
            issued[id(group)] += 1
            return group.allreduce_coalesced([output, tensor])  # type: ignore[no-any-return]

        def coalesced(group: Any, outputs: Any, inputs: Any, *_: Any) -> dist.Work:
            issued[id(group)] += 1
            return group.allreduce_coalesced(outputs + inputs)  # type: ignore[no-any-return]

        counting = dict.fromkeys(fake_world.SINGLE, single) | dict.fromkeys(
            fake_world.COALESCED, coalesced
        )
        with fake_world.methods(counting):
            yield


class UnitCalls:
    """One unit's calls, as FSDP2 makes them on buffers that it has allocated."""

    def __init__(self, engine: Engine, place: int) -> None:
        unit = engine.units[place]
        topology = engine.topology
        self.entry = engine.entries[unit]
        gather, reduction = engine._collectives[unit]
        group = topology.mesh.get_group()
        whole = gather.allocate(
            (topology.world_size * ELEMENTS,), dtype=torch.float32, device=torch.device("cpu")
        ).zero_()
        shard = whole.view(topology.world_size, -1)[topology.rank]
        reduced = shard.clone(), whole.clone(), group, dist.ReduceOp.AVG
        self.calls: dict[str, Callable[[], object]] = {
            "gather": partial(gather, whole, shard, group),
            "reduce": partial(reduction, *reduced),
            "FSDP2 gather": partial(DefaultAllGather(), whole, shard, group),
            "FSDP2 reduce": partial(DefaultReduceScatter(), *reduced),
        }


class Rank:
    """One rank's units, in the middle of a pass: ranks agree once per pass, not per unit."""

    def __init__(
        self, topology: fcdp.Topology, collectives: Collectives, *, detect_writes: bool
    ) -> None:
        self._topology = topology
        self._collectives = collectives
        width = ELEMENTS * topology.world_size
        model = nn.Sequential(*(nn.Linear(1, width, bias=False) for _ in range(UNITS)))
        cache = fcdp.CacheOptions(detect_writes=detect_writes)
        fcdp.shard(model, topology, units=model, cache=cache)
        self._engine = engine_of(model)
        self._engine.controller.begin_pass()
        self._units = [UnitCalls(self._engine, place) for place in range(UNITS)]
        self._round("gather")  # agrees

    def measure(self, path: str, rounds: int) -> tuple[Counts, list[float]]:
        """Collectives of one call, and microseconds of each, of one path."""
        call, _, state = path.partition(", ")
        for _ in range(3):
            self._round(call, state)
        self._collectives.named(self._topology)
        taken = [micro for _ in range(rounds) for micro in self._round(call, state)]
        counts = self._collectives.named(self._topology)
        assert not any(count % len(taken) for count in counts.values()), counts
        return {name: count // len(taken) for name, count in counts.items()}, taken

    def _round(self, name: str, state: str = "") -> list[float]:
        """Microseconds of each unit's call, in the order of a forward."""
        self._engine.controller._begin_order(trains=False)
        if state == "stale":
            for unit in self._units:
                unit.entry.generation += 1  # as the ranks' agreement does
        taken = []
        for unit in self._units:
            call = unit.calls[name]
            begun = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begun) * 1e6)
        return taken


@contextlib.contextmanager
def rank_of(nodes: int, ranks_per_node: int, *, detect_writes: bool) -> Iterator[Rank]:
    """Make this process one of ``nodes × ranks_per_node`` ranks, without a process group before."""
    collectives = Collectives()
    with (
        fake_world.world(nodes, ranks_per_node, "cpu") as topology,
        mock.patch("fcdp.engine.Streams", fake_world.DeviceStreams),
        mock.patch.dict("fcdp.checksum._WORDS", {4: torch.int64}),
        collectives.in_place_of_torchs(),
        torch.no_grad(),
    ):
        yield Rank(topology, collectives, detect_writes=detect_writes)


def counted(nodes: int, ranks_per_node: int, *, detect_writes: bool) -> dict[str, Counts]:
    with rank_of(nodes, ranks_per_node, detect_writes=detect_writes) as rank:
        return {path: rank.measure(path, rounds=1)[0] for path in PATHS}


#: Nodes, ranks per node, ``detect_writes``, path.
_Key = tuple[int, int, bool, str]


@dataclass(slots=True)
class Measured:
    """Calls of one path on one shape."""

    counts: Counts
    #: Microseconds of each.
    taken: list[float] = field(default_factory=list)
    #: Medians of turns, or of processes, as multiples of FSDP2's.
    multiples: list[float] = field(default_factory=list)


def in_turns(shapes: Sequence[tuple[int, int]]) -> dict[_Key, Measured]:
    """Measure all shapes and paths in this process."""
    torch.set_num_threads(1)
    found: dict[_Key, Measured] = {}
    for (nodes, ranks), detects in itertools.product(shapes, (True, False)):
        with rank_of(nodes, ranks, detect_writes=detects) as rank:
            gc.disable()
            for _ in range(TURNS):
                medians = {}
                for path in PATHS:
                    key = nodes, ranks, detects, path
                    counts, taken = rank.measure(path, ROUNDS)
                    found.setdefault(key, Measured(counts)).taken += taken
                    medians[path] = statistics.median(taken)
                for path in PATHS:
                    multiple = medians[path] / medians[PLAIN[path]]
                    found[nodes, ranks, detects, path].multiples.append(multiple)
            gc.enable()
    return found


def measured(
    shapes: Sequence[tuple[int, int]] = SHAPES, processes: int = PROCESSES
) -> dict[str, Any]:
    """Counts and times of all shapes and paths, and their multiples of FSDP2's own."""
    found: dict[_Key, Measured] = {}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for of_one in pool.imap(in_turns, [shapes] * processes):
            for key, more in of_one.items():
                of = found.setdefault(key, Measured(more.counts))
                of.taken += more.taken
                of.multiples.append(statistics.median(more.multiples))
    return {
        "command": "python -m scripts.host_cost --write",
        "date": date.today().isoformat(),
        "machine": f"{provenance.gather().hardware['cpu']}, shared with other work",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "elements_per_rank": ELEMENTS,
        "processes": processes,
        "calls": ROUNDS * TURNS * processes * UNITS,
        "rows": [
            {
                "nodes": nodes,
                "ranks_per_node": ranks,
                "detect_writes": detects,
                "path": path,
                "collectives": of.counts,
                "median_us": round(statistics.median(of.taken), 1),
                "multiple": _spread(of.multiples),
            }
            for (nodes, ranks, detects, path), of in found.items()
        ],
    }


def tables(record: dict[str, Any]) -> str:
    """The tables of the page, as Markdown."""
    shapes = list(dict.fromkeys((row["nodes"], row["ranks_per_node"]) for row in record["rows"]))
    named = [f"{n * ranks} ranks ({n} × {ranks})" for n, ranks in shapes]
    by: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in record["rows"]:
        by[row["path"], row["detect_writes"]].append(row)
    issued, times, multiples = [], [], []
    for path, name in PATHS.items():
        plain = path.startswith("FSDP2")
        issued.append((name, *(_issued(row) for row in by[path, True])))
        for detects in (False,) if plain else (True, False):
            rows = by[path, detects]
            switch = "–" if plain else "on" if detects else "off"
            cells = [f"{row['median_us']:.0f}" for row in rows]
            times.append((name, switch, *cells))
            if not plain:
                cells = ["{1:.1f} ({0:.1f}–{2:.1f})".format(*row["multiple"]) for row in rows]
                multiples.append((name, switch, *cells))
    made = (
        f"Made by `{record['command']}` on {record['date']}: {record['machine']}, torch "
        f"{record['torch']}, Python {record['python']}; {record['calls']:,} calls each in "
        f"{record['processes']} processes, shards of {record['elements_per_rank']} elements. It is "
        "an accelerator's path on the CPU: "
        "collectives move nothing, streams order nothing, and a checksum's words are as wide as "
        "their keys, as an accelerator widens them in the kernel that multiplies them. Copies on "
        "the device are in the times."
    )
    words = ("Call", "`detect_writes`")
    return "\n\n".join(
        [
            made,
            "Collectives issued per call:",
            text.table(("Call", *named), issued, words=("Call", *named)),
            "Host time per call as multiples of FSDP2's own, medians and extremes of processes:",
            text.table((*words, *named), multiples, words),
            "Host microseconds per call, medians:",
            text.table((*words, *named), times, words),
        ]
    )


def _spread(values: Sequence[float]) -> list[float]:
    """Least, median and most."""
    return [round(each, 1) for each in (min(values), statistics.median(values), max(values))]


def _issued(row: dict[str, Any]) -> str:
    return ", ".join(f"{count} {group}" for group, count in row["collectives"].items())


def main(arguments: Sequence[str]) -> int:
    record = measured()
    if "--write" in arguments:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(tables(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
