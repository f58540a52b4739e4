"""``python -m scripts.gpu --out results/gpu``: all parts, one after another, then a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

import torch

from scripts.gpu import constants, cost, marked, parity, ranks, records
from scripts.gpu.records import Brief, DeviceType, Record, shared

SUMMARY = "summary.json"
#: Before and after the parts: imports, provenance, the table.
_BESIDE_S = 10.0
_LONGEST_DETAIL = 1000


class Measure(Protocol):
    def __call__(self, brief: Brief, record: Record, limit_s: float) -> None: ...


@dataclass(frozen=True)
class Part:
    measure: Measure
    #: Of the budget; what a part leaves goes to those behind it.
    share: float
    #: Whether its record is a file of its own; else a file that it writes is.
    recorded: bool = True


def correctness(brief: Brief, record: Record, limit_s: float) -> None:
    """The GPU-marked tests, and parity with FSDP2 for all policies and codecs."""
    parts = {None: 0.4, parity.IMITATED: 0.24, parity.PAIR: 0.36}
    for world, seconds in shared(parts, limit_s):
        if world is None:
            marked.check(record, brief, seconds)
        else:
            parity.compare(record, brief, world, parity.policies(brief.small), seconds)


def nccl(brief: Brief, record: Record, limit_s: float) -> None:
    """NCCL itself, between ranks that are separate hosts."""
    for world, seconds in shared(dict.fromkeys(parity.WORLDS, 1.0), limit_s):
        parity.compare(record, brief, world, parity.tunings(brief.small), seconds)


#: In the order of what matters most, should the machine be lent for less time than hoped.
PARTS = {
    "correctness": Part(correctness, 0.42),
    "memory": Part(cost.memory, 0.14),
    "nccl": Part(nccl, 0.20),
    "overlap": Part(cost.overlap, 0.14),
    "constants": Part(constants.measure, 0.10, recorded=False),
}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu: needs a CUDA device; --device cpu shows that every part runs", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        brief = Brief(options.out, Path(scratch), options.device, small=options.device == "cpu")
        found = run(brief, options.only, options.budget_s)
    seconds = time.monotonic() - started
    records.write(
        options.out / SUMMARY,
        {
            "evidence": "measured",
            "device": options.device,
            "verdict": "failed" if _any_failed(found) else "passed",
            "seconds": round(seconds, 1),
            "budget_s": options.budget_s,
            "parts": [_in_short(record) for record in found],
            **records.origin(options.device, options.commit),
        },
    )
    print(f"\n{records.table(found)}\n\n{seconds:.0f} s; records: {options.out}")
    return 1 if _any_failed(found) else 0


def run(brief: Brief, names: Sequence[str], budget_s: float) -> list[Record]:
    """Run the parts; whatever one of them does, the next ones run."""
    found = []
    shares = {name: PARTS[name].share for name in names}
    for name, limit_s in shared(shares, budget_s - min(_BESIDE_S, budget_s / 10)):
        print(f"{name}: up to {limit_s:.0f} s ...", flush=True)
        found.append(_run(name, brief, limit_s))
        print(f"{name}: {found[-1].verdict} after {found[-1].seconds:.0f} s", flush=True)
    return found


def _run(name: str, brief: Brief, limit_s: float) -> Record:
    record, started = Record(name), time.monotonic()
    try:
        PARTS[name].measure(brief, record, limit_s)
    except Exception:
        record.failed("the part itself", traceback.format_exc())
    record.seconds = time.monotonic() - started
    if PARTS[name].recorded:
        records.write(brief.out / f"{name}.json", record.as_json(brief.device))
    return record


def _in_short(record: Record) -> dict[str, object]:
    return {
        "part": record.part,
        "verdict": record.verdict,
        "seconds": round(record.seconds, 1),
        "figures": record.figures,
        "not passed": [
            {"name": check.name, "verdict": check.verdict, "detail": check.detail[:_LONGEST_DETAIL]}
            for check in record.checks
            if check.verdict != "passed"
        ],
    }


def _any_failed(found: Sequence[Record]) -> bool:
    return any(record.verdict == "failed" for record in found)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu", description="Everything that waits for a GPU, in 8 minutes."
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the records")
    parser.add_argument("--device", choices=get_args(DeviceType), default="cuda")
    parser.add_argument(
        "--only", type=_parts, default=[*PARTS], metavar="PART,...", help=", ".join(PARTS)
    )
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all of it")
    parser.add_argument("--commit", help="to be recorded where the tree has no repository")
    options = parser.parse_args(arguments)
    if not options.budget_s > 0:
        parser.error(f"--budget-s = {options.budget_s}: must be more than 0 seconds")
    return options


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r}: allowed are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    ranks.preload()
    sys.exit(main(sys.argv[1:]))
