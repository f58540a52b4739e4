"""Ranks that go wrong on purpose: what the tests of :mod:`scripts.gpu.groups` start."""

from __future__ import annotations

import os
import signal
import time

from scripts.gpu.rank import Rank


def on_this_rank(rank: Rank) -> None:
    rank.answer({"rank": rank.rank, "host": os.environ.get("NCCL_HOSTID")})
    fault = rank.brief["fault"] if rank.rank == rank.brief["at"] else "none"
    if fault == "raise":
        raise ValueError("made to fail")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        _hang()


def _hang() -> None:
    while True:
        time.sleep(60)
