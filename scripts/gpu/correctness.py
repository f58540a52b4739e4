"""Correctness: the GPU-marked tests, and parity with FSDP2 for all policies and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.gpu import groups, marked, parity
from scripts.gpu.parity import BOUNDS, Case
from scripts.gpu.records import Brief, Deadline, Record

#: Of the part's time, at most.
_TESTS_SHARE = 0.4
#: After a hang or a crash the cases behind it get new ranks, so often.
_RESTARTS = 3
#: Under this no ranks are started.
_LEAST_S = 20.0


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    deadline = Deadline(limit_s)
    marked.check(record, brief, _TESTS_SHARE * limit_s)
    # On one GPU a world of real ranks takes turns: the imitated one is quick, and keeps the
    # device as busy as one rank of sixteen does. It goes first: NCCL may refuse the other.
    _compare(record, brief, "imitated 2 × 8", (2, 8), fake=True, limit_s=0.4 * deadline.left())
    transport = "gloo" if brief.device == "cpu" else "NCCL, two ranks on one GPU"
    _compare(record, brief, f"2 × 1, {transport}", (2, 1), fake=False, limit_s=deadline.left())


@dataclass
class Found:
    """What came of a world's cases."""

    #: By case: one line per rank.
    lines: dict[Case, list[dict[str, Any]]] = field(default_factory=dict)
    #: By case that broke its ranks, or was not reached: why.
    broken: dict[Case, str] = field(default_factory=dict)


def _compare(
    record: Record,
    brief: Brief,
    world: str,
    topology: tuple[int, int],
    *,
    fake: bool,
    limit_s: float,
) -> None:
    found = _run(brief, topology, fake=fake, limit_s=limit_s)
    record.details[f"parity, {world}"] = {
        case.name: {**lines[0], "equal": all(line["equal"] for line in lines)}
        for case, lines in found.lines.items()
    }
    judge(record, world, parity.cases(brief.small), found)
    record.figures[f"equal on {world.split(',')[0]}"] = (
        f"{sum(all(line['equal'] for line in lines) for lines in found.lines.values())}"
        f" of {len(parity.cases(brief.small))}"
    )


def _run(brief: Brief, topology: tuple[int, int], *, fake: bool, limit_s: float) -> Found:
    deadline, found, first = Deadline(limit_s), Found(), 0
    cases = parity.cases(brief.small)
    for _ in range(1 + _RESTARTS):
        if first == len(cases) or deadline.left() < min(_LEAST_S, limit_s / 2):
            break
        outcome = groups.run(
            "parity",
            {"small": brief.small, "first": first, "fake": fake, "topology": topology},
            world_size=1 if fake else topology[0] * topology[1],
            device=brief.device,
            limit_s=deadline.left(),
            apart=True,
        )
        known = min(map(len, outcome.lines))
        for index in range(known):
            found.lines[cases[first + index]] = [lines[index] for lines in outcome.lines]
        first += known
        if outcome.state != "ended" and first < len(cases):
            found.broken[cases[first]] = "\n".join([str(outcome), *outcome.stacks])
            first += 1
            if cases[first - 1].policy == "fsdp2":
                break  # without FCDP: this world cannot be had here
    for case in cases[first:]:
        found.broken[case] = "not reached in time"
    return found


def judge(record: Record, world: str, cases: Sequence[Case], found: Found) -> None:
    """Turn what came of the cases into checks."""
    references = [case for case in cases if case.policy == "fsdp2"]
    refused = [found.broken[case] for case in references if case in found.broken]
    if refused:
        record.not_measured(f"parity on {world}", f"FSDP2 alone does not run there: {refused[0]}")
        return
    unequal = [case.name for case in references if not _equal(found, case)]
    record.passed_if(
        not unequal and all(found.lines[case][0]["trains"] for case in references),
        f"FSDP2 on {world} trains and gives the same bits twice",
        ", ".join(unequal),
    )
    for codec in dict.fromkeys(case.codec for case in cases):
        group = [c for c in cases if c.codec == codec and c.policy != "fsdp2"]
        wrong = [case.name for case in group if not _equal(found, case) or _idle(found, case)]
        broken = [f"{c.name}: {found.broken[c]}" for c in group if c in found.broken]
        what = "FSDP2" if codec is None else "no cache, repeatedly,"
        record.passed_if(
            not wrong,
            f"{codec or 'all policies'} on {world}: equal to {what} bit for bit, served by caches",
            "; ".join([f"{len(wrong)} not: {', '.join(wrong)}", *broken[:1]]) if wrong else "",
        )
        if codec is not None:
            farthest = max((_distance(found, case) for case in group), default=0.0)
            record.passed_if(
                farthest <= BOUNDS[codec],
                f"{codec} on {world}: losses within {BOUNDS[codec]:.0%} of FSDP2's",
                f"{farthest:.2%} at most",
            )


def _equal(found: Found, case: Case) -> bool:
    return case in found.lines and all(line["equal"] for line in found.lines[case])


def _idle(found: Found, case: Case) -> bool:
    """Whether a cache served nothing, so that being equal says nothing of it."""
    return case.policy != "none" and not all(line["hits"] for line in found.lines[case])


def _distance(found: Found, case: Case) -> float:
    return max((line["distance"] for line in found.lines.get(case, [])), default=0.0)
