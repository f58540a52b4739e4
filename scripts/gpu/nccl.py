"""NCCL itself: ranks that share one GPU as separate hosts, between them sockets of the loopback.

NCCL refuses two ranks of one host on one GPU; with an ``NCCL_HOSTID`` of its own each rank is
another host, and nothing but its network transport is left. The ranks take turns on the GPU, so
that this says nothing of speed: it says that nothing hangs, and that losses are FSDP2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import fcdp
from scripts.gpu import groups
from scripts.gpu.rank import Rank
from scripts.gpu.records import Brief, Deadline, Record
from scripts.gpu.training import Recipe, Trained, deterministic, train

TOPOLOGIES = ((2, 1), (2, 2), (4, 1))
#: More than two summands have more than one order, and micro-batches are added before ranks.
_TOLERANCE = 1e-4
RECIPES = {
    "full": Recipe(fcdp.HostCache()),
    "frozen": Recipe(fcdp.HostCache(), lora=True),
    "two micro-batches": Recipe(fcdp.HostCache(), micro_batches=2),
    "frozen, two micro-batches": Recipe(fcdp.HostCache(), lora=True, micro_batches=2),
}


#: Where it is only to be shown that it runs: both kinds of tuning, one and two micro-batches.
_FEW = ("full", "frozen, two micro-batches")


def recipes(small: bool) -> dict[str, Recipe]:
    return {name: recipe for name, recipe in RECIPES.items() if not small or name in _FEW}


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    deadline = Deadline(limit_s)
    for index, topology in enumerate(TOPOLOGIES):
        name = f"{topology[0]} × {topology[1]}"
        outcome = groups.run(
            "training",
            {"topology": topology, "small": brief.small},
            world_size=topology[0] * topology[1],
            device=brief.device,
            # What one does not use, the next ones have.
            limit_s=deadline.left() / (len(TOPOLOGIES) - index),
            apart=True,
        )
        judge(record, name, list(recipes(brief.small)), outcome, exact=topology == (2, 1))
        record.details[name] = {
            "state": outcome.state,
            "seconds": round(outcome.seconds, 1),
            "rank 0": outcome.lines[0],
        }
        if outcome.state != "ended":
            record.details[name] |= {"error": outcome.error, "stacks": outcome.stacks}
        record.figures[name] = f"{outcome.state} {outcome.seconds:.0f} s"


def judge(
    record: Record, name: str, expected: Sequence[str], outcome: groups.Outcome, *, exact: bool
) -> None:
    """No hang, and the same losses as FSDP2's on every rank."""
    done = [len(lines) for lines in outcome.lines]
    reached = "" if outcome.state == "ended" else f"{min(done)} of {len(expected)} runs; {outcome}"
    if outcome.state == "ended":
        record.passed_if(True, f"{name}: no hang")
    else:
        record.failed(f"{name}: no hang", reached)
    for index, run in enumerate(expected):
        found = [lines[index] for lines in outcome.lines if len(lines) > index]
        if len(found) < len(outcome.lines):
            continue
        bits = exact and "micro" not in run
        farthest = max(line["distance"] for line in found)
        record.passed_if(
            all(line["equal"] for line in found) if bits else farthest <= _TOLERANCE,
            f"{name}, {run}: losses of FSDP2, {'bit for bit' if bits else 'but for the order'}",
            f"{farthest:.1e} at most",
        )
        record.passed_if(
            all(line["hits"] for line in found), f"{name}, {run}: the cache serves gathers"
        )


def on_this_rank(rank: Rank) -> None:
    deterministic()
    nodes, ranks_per_node = rank.brief["topology"]
    topology = fcdp.Topology.build(nodes, ranks_per_node, rank.device.type)
    references: dict[Recipe, Trained] = {}
    for name, recipe in recipes(rank.brief["small"]).items():
        recipe = replace(recipe, steps=3 if rank.brief["small"] else 5)
        reference = replace(recipe, policy=None)
        if reference not in references:
            references[reference] = train(reference, topology, rank.device)
        rank.answer(_compared(name, train(recipe, topology, rank.device), references[reference]))


def _compared(name: str, found: Trained, expected: Trained) -> dict[str, Any]:
    return {
        "run": name,
        "equal": found.equals(expected),
        "distance": found.distance(expected),
        "hits": found.hits,
        "losses": found.losses,
        "fsdp2_losses": expected.losses,
    }
