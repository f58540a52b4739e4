"""One rank's process, started by :mod:`scripts.gpu.groups`."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.gpu.groups import STACKS_S

#: Where each task's function is; only its module is imported.
TASKS = {
    "parity": "scripts.gpu.parity:on_this_rank",
    "training": "scripts.gpu.nccl:on_this_rank",
    "memory": "scripts.gpu.memory:on_this_rank",
    "overlap": "scripts.gpu.overlap:on_this_rank",
    "constants": "scripts.gpu.constants:on_this_rank",
    "fault": "scripts.gpu.rank:go_wrong",
}


@dataclass(frozen=True)
class Rank:
    """Who this is, what it is asked and where it answers."""

    rank: int
    world_size: int
    device: torch.device
    brief: Mapping[str, Any]
    answer: Callable[[Mapping[str, Any]], None]


def main(folder: Path, given: Mapping[str, Any]) -> None:
    limit_s = float(given["limit_s"])
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(0.5, limit_s - STACKS_S), file=2)
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = _device(given["device"], given["index"])
    with (folder / f"{given['rank']}.jsonl").open("a", encoding="utf-8", buffering=1) as answers:

        def answer(line: Mapping[str, Any]) -> None:
            answers.write(json.dumps(line) + "\n")

        if given["world_size"] > 1:
            _join(folder, given, limit_s)
        rank = Rank(given["rank"], given["world_size"], device, given["brief"], answer)
        module, _, function = TASKS[given["task"]].partition(":")
        getattr(importlib.import_module(module), function)(rank)
        if dist.is_initialized():
            _leave(device)
    faulthandler.cancel_dump_traceback_later()


def _device(kind: str, index: int) -> torch.device:
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join(folder: Path, given: Mapping[str, Any], limit_s: float) -> None:
    dist.init_process_group(
        "gloo" if given["device"] == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'store'}",
        rank=given["rank"],
        world_size=given["world_size"],
        # Beyond the limit, so that a hang shows as one, with its stacks.
        timeout=timedelta(seconds=2 * limit_s + 60),
    )


def _leave(device: torch.device) -> None:
    """Go when all are ready to: what the others still wait for may be this rank's last message."""
    if device.type != "cpu":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cpu"))
    dist.destroy_process_group()


def go_wrong(rank: Rank) -> None:
    """Fail, crash or hang on purpose: what the tests of :mod:`scripts.gpu.groups` start."""
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
