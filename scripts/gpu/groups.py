"""Ranks as processes of their own, with a time limit: a hang or a crash ends with them.

A rank answers with lines of JSON, each written when it is known, so that what was found before a
hang is kept; a rank that is still busy shortly before the limit writes its stacks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.records import provenance
from scripts.gpu.records import DeviceType

State = Literal["ended", "hung", "died"]

#: The stacks are written this long before the limit.
STACKS_S = 3.0
_POLL_S = 0.1
# One process imports torch, and each rank is a copy of it: seconds per rank.
_context = multiprocessing.get_context("forkserver")
_PRELOAD = ["torch", "torch.distributed.fsdp", "fcdp", "scripts.gpu.rank"]
_LONGEST_TEXT = 4000


def preload() -> None:
    """Have ranks begin with what they import: for a program whose only ranks they are."""
    _context.set_forkserver_preload(_PRELOAD)


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
        return f"{self.state} after {self.seconds:.0f} s: {self.error or 'no error was written'}"


def run(
    task: str,
    brief: Mapping[str, Any],
    *,
    world_size: int,
    device: DeviceType,
    limit_s: float,
    apart: bool = False,
) -> Outcome:
    """Run ``task`` of :mod:`scripts.gpu.rank` on ``world_size`` ranks; ``apart``: as other hosts.

    Without ``apart`` each rank of several has a GPU of its own.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks: list[Any] = []
        try:
            for rank in range(world_size):
                given = {
                    "task": task,
                    "brief": dict(brief),
                    "rank": rank,
                    "world_size": world_size,
                    "device": device,
                    "index": 0 if apart else rank,
                    "limit_s": limit_s,
                }
                ranks.append(_start(folder, rank, given, apart=apart))
            state = _watch(ranks, started + limit_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        texts = [_text(folder / f"{rank}.err") for rank in range(world_size)]
        codes = [process.exitcode for process in ranks]
        return Outcome(
            state,
            [_lines(folder / f"{rank}.jsonl") for rank in range(world_size)],
            "" if state == "ended" else _error(folder, codes),
            [_clipped(text) for text in texts] if state == "hung" else [],
            time.monotonic() - started,
        )


def _start(folder: Path, rank: int, given: Mapping[str, Any], *, apart: bool) -> Any:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    if given["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if apart:
        environment |= _APART | {"NCCL_HOSTID": f"fcdp-{rank}"}
    process = _context.Process(
        target=_live, args=(folder, dict(given), environment), name=f"rank {rank}"
    )
    process.start()
    return process


def _live(folder: Path, given: dict[str, Any], environment: dict[str, str]) -> None:
    """A rank's process, forked where torch is imported and CUDA is not initialised."""
    errors = os.open(folder / f"{given['rank']}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(errors, stream)
    os.environ.update(environment)
    from scripts.gpu import rank

    try:
        rank.main(folder, given)
    except BaseException:
        (folder / f"{given['rank']}.failed").touch()  # when: others fail because this one did
        raise


def _watch(ranks: Sequence[Any], end: float) -> State:
    """Wait until all have ended, one has failed or the time is over."""
    while time.monotonic() < end:
        codes = [process.exitcode for process in ranks]
        if any(code not in (None, 0) for code in codes):
            time.sleep(5 * _POLL_S)  # what the others say of it helps
            return "died"
        if all(code == 0 for code in codes):
            return "ended"
        time.sleep(_POLL_S)
    return "hung"


def _error(folder: Path, codes: Sequence[int | None]) -> str:
    """What the first rank wrote that ended with an error; the last lines decide."""
    failed = [rank for rank, code in enumerate(codes) if code not in (0, -signal.SIGKILL)]
    if not failed:
        return "no rank ended within the time limit"
    first = min(failed, key=lambda rank: _failed_at(folder, rank))
    said = _clipped(_text(folder / f"{first}.err")) or "nothing was written"
    return f"rank {first}, exit status {codes[first]}: {said}"


def _failed_at(folder: Path, rank: int) -> int:
    """A rank that crashed could not write when, and did not do so because of another one."""
    mark = folder / f"{rank}.failed"
    return mark.stat().st_mtime_ns if mark.exists() else 0


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _clipped(text: str) -> str:
    return provenance.scrub(text.strip()[-_LONGEST_TEXT:])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may have been cut off."""
    whole = [line for line in _text(file).splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]
