"""Ranks as processes of their own, with a time limit: a hang or a crash ends with them.

A rank answers with lines of JSON, each written when it is known, so that what was found before a
hang is kept; a rank that is still busy shortly before the limit writes its stacks.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

import fcdp
from experiments.records import provenance
from scripts.gpu.records import DeviceType

State = Literal["ended", "hung", "died"]

#: The stacks are written this long before the limit.
_STACKS_S = 3.0
#: Given to the others when one has failed: what they say of it helps.
_GRACE_S = 1.0
_LONGEST_TEXT = 4000
#: Several ranks on one GPU: NCCL refuses two of one host, so each is a host of its own, and what
#: hosts have between them is sockets; here those of the loopback interface.
_APART = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # The ranks take turns on the GPU: more channels would not be faster, and are more to start.
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "WARN",
}


def preload() -> None:
    """Have ranks begin with what they import: for a program whose only ranks they are.

    One process imports torch, and each rank is a copy of it: seconds per rank.
    """
    modules = ["torch", "torch.distributed.fsdp", "fcdp", __name__]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)


@dataclass(frozen=True)
class Outcome:
    state: State
    #: By rank.
    lines: list[list[dict[str, Any]]]
    #: The first error, and where the ranks were: empty where all ended.
    error: str
    stacks: list[str]
    seconds: float

    def __str__(self) -> str:
        said = f"{self.state} after {self.seconds:.0f} s: {self.error or 'no error was written'}"
        return "\n".join([said, *self.stacks])


@dataclass(frozen=True)
class Rank:
    """One rank's process: who it is, what it is asked, and where it answers."""

    rank: int
    world_size: int
    device: torch.device
    brief: Mapping[str, Any]
    limit_s: float
    folder: Path

    def answer(self, line: Mapping[str, Any]) -> None:
        with (self.folder / f"{self.rank}.jsonl").open("a", encoding="utf-8") as answers:
            answers.write(json.dumps(line) + "\n")

    def join(self, nodes: int, ranks_per_node: int) -> fcdp.Topology:
        """Form the group of all ranks."""
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{self.folder / 'store'}",
            rank=self.rank,
            world_size=self.world_size,
            # Beyond the limit, so that a hang shows as one, with its stacks.
            timeout=timedelta(seconds=2 * self.limit_s + 60),
        )
        return fcdp.Topology.build(nodes, ranks_per_node, self.device.type)

    def leave(self) -> None:
        """Go when all are ready to: what the others still wait for may be the last message."""
        if dist.is_initialized():
            if self.device.type != "cpu":
                torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1, device="cpu"))
            dist.destroy_process_group()


Task = Callable[[Rank], None]


def run(
    task: Task,
    brief: Mapping[str, Any],
    *,
    world_size: int,
    device: DeviceType,
    limit_s: float,
    apart: bool = False,
) -> Outcome:
    """Run ``task``, a function of a module, on ``world_size`` ranks; ``apart``: as other hosts.

    Without ``apart`` each rank of several has a GPU of its own.
    """
    started = time.monotonic()
    state: State = "hung"
    error = "no rank ended within the time limit"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        group = start_processes(
            _live,
            (task, dict(brief), world_size, device, limit_s, apart, folder),
            nprocs=world_size,
            join=False,
            daemon=True,  # none outlives this process, whatever happens while they are started
            start_method="forkserver",
        )
        try:
            while (left := started + limit_s - time.monotonic()) > 0:
                if group.join(left, _GRACE_S):
                    state, error = "ended", ""
                    break
        except (ProcessExitedException, ProcessRaisedException) as failure:
            first = failure.error_index
            said = f"{failure}\n{_text(folder / f'{first}.err')}"
            state, error = "died", f"rank {first}: {_clipped(said)}"
        finally:
            for process in group.processes:
                process.kill()
                process.join()
        files = range(world_size)
        return Outcome(
            state,
            [_lines(folder / f"{rank}.jsonl") for rank in files],
            error,
            [_clipped(_text(folder / f"{rank}.err")) for rank in files if state == "hung"],
            time.monotonic() - started,
        )


def _live(
    rank: int,
    task: Task,
    brief: Mapping[str, Any],
    world_size: int,
    device: DeviceType,
    limit_s: float,
    apart: bool,
    folder: Path,
) -> None:
    """A rank's process, forked where torch is imported and CUDA is not initialised."""
    errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(errors, stream)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(0.5, limit_s - _STACKS_S), file=2)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if apart:
        os.environ |= _APART | {"NCCL_HOSTID": f"fcdp-{rank}"}
    place = torch.device("cpu")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    else:
        place = torch.device("cuda", 0 if apart else rank)
        torch.cuda.set_device(place)
    this = Rank(rank, world_size, place, brief, limit_s, folder)
    task(this)
    this.leave()
    faulthandler.cancel_dump_traceback_later()


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _clipped(text: str) -> str:
    return provenance.scrub(text.strip()[-_LONGEST_TEXT:])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may have been cut off."""
    whole = [line for line in _text(file).splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]
