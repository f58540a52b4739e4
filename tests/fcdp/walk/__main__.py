"""Walks outside of the suite: any seeds, some kinds of event alone, shrunk where they fail."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.fcdp.walk.rank import HANDLERS
from tests.fcdp.walk.seeds import draw, run
from tests.fcdp.walk.shrink import shrunk
from tests.ranks import Pools


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fcdp.walk", description=__doc__)
    parser.add_argument("seeds", nargs="+", help="numbers, or ranges such as 0-199")
    parser.add_argument("--only", nargs="+", choices=HANDLERS, help="these kinds of event")
    parser.add_argument("--without", nargs="+", choices=HANDLERS, default=[], help="not these")
    parser.add_argument("--shrink", action="store_true", help="fewer events that fail as well")
    arguments = parser.parse_args()
    kinds = set(arguments.only or HANDLERS) - set(arguments.without)
    pools, failed, began = Pools(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for seed in _numbers(arguments.seeds):
            case = draw(seed, kinds)
            text = run(pools, case, Path(scratch) / str(seed))
            failed += text is not None
            if text is not None and arguments.shrink:
                text = run(pools, shrunk(pools, case, Path(scratch)), Path(scratch) / "again")
            if text is not None:
                print(text, flush=True)
        print(f"{failed} failed, {time.monotonic() - began:.0f} s")
    pools.close()
    return int(failed > 0)


def _numbers(texts: list[str]) -> list[int]:
    numbers: list[int] = []
    for text in texts:
        first, _, last = text.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


if __name__ == "__main__":
    raise SystemExit(main())
