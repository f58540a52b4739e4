"""A rented node's side: what the runner's launcher starts on it, for one launch or one question.

The question comes as one line by standard input, the answer goes as one line to standard output.
When the input is closed, nothing that was started here goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from experiments.clusters import lifetimes, ranks
from experiments.clusters.causes import Board
from experiments.clusters.counters import out_of_memory_kills, transmitted_bytes
from experiments.clusters.messages import (
    BEAT_S,
    SILENCE_S,
    Description,
    Ended,
    Inquiry,
    Order,
    RankExit,
    RankReport,
    question,
)
from experiments.records import provenance

#: Bytes of each log that travel; the end says why a rank failed.
_LONGEST_LOG = 1_000_000
#: Bytes of a log that are quoted where torchrun itself fails.
_LONGEST_QUOTE = 4000
#: Settings of NCCL that name a machine, a file or an identity.
_PRIVATE_SETTINGS = ("FILE", "HOST", "COMM_ID", "PATH", "PLUGIN")
_PR_SET_CHILD_SUBREAPER = 36
_TORCHRUN = (sys.executable, "-u", "-m", "experiments.clusters.torchrun")
#: Seconds between two looks at the ranks.
_WATCH_INTERVAL_S = 0.1

_APART = "the runner must be on the first node, or its directory (--output) one that both see"


def main() -> None:
    """Read one question from standard input and answer it."""
    # Whatever else is printed here goes to standard error: the answer must stand alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    # Slurm ends a job with SIGTERM: what was started here must be ended all the same.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    answered = Event()
    beating = Thread(target=_beat, args=(answers, answered), daemon=True)
    beating.start()
    asked = question.validate_json(sys.stdin.buffer.readline())
    answer = describe(asked, os.environ) if isinstance(asked, Inquiry) else run(asked)
    answered.set()
    beating.join()
    with suppress(BrokenPipeError), open(answers, "wb") as file:  # the runner may be gone
        file.write(answer.model_dump_json().encode() + b"\n")


def _beat(descriptor: int, answered: Event) -> None:
    with suppress(BrokenPipeError):
        while not answered.wait(BEAT_S):
            os.write(descriptor, b"\n")


def describe(inquiry: Inquiry, environment: Mapping[str, str]) -> Description:
    """Describe this node as the others see it.

    Raises ``ValueError`` for an interface that is not there.
    """
    address = _address_towards(inquiry.head)
    interface = _interface_with(address)
    counted = inquiry.counted_interface or environment.get("FCDP_INTERFACE") or interface
    try:
        transmitted_bytes(counted)
    except ValueError as error:
        raise ValueError(f"FCDP_INTERFACE: {error}") from error
    settings = {
        name: provenance.scrub(value)
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_") and not any(part in name for part in _PRIVATE_SETTINGS)
    }
    speed = psutil.net_if_stats()[interface].speed
    network: dict[str, Any] = {
        "interface": interface,
        "counted_interface": counted,
        # As the driver says; virtual interfaces say nothing.
        "nominal_bits_per_s": speed * 10**6 or None,
        "nccl": settings,
    }
    commit = provenance.gather().commit
    return Description(address=address, interface=interface, commit=commit, network=network)


def _address_towards(head: str) -> str:
    """The address from which this machine would send to ``head``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, 9))
        return str(probe.getsockname()[0])


def _interface_with(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ValueError(f"no network interface of this node has the address {address}")


def run(order: Order) -> Ended:
    """Launch the ranks and wait until they have ended, the input is closed, or time is over."""
    _adopt_orphans()
    kills_before = out_of_memory_kills()
    with lifetimes.folder() as folder:
        logs = Path(order.logs)
        shared = (logs / order.marker).exists()
        if not shared:
            logs = folder / "logs"
            logs.mkdir()
        board = Board(folder, range(order.node * order.ranks, (order.node + 1) * order.ranks))
        board.create()
        exits: dict[int, RankExit] = {}
        error = None
        if order.node == 0 and not shared:
            error = f"node 0 does not see {order.logs}: {_APART}"
        else:
            try:
                exits = _Ranks(order, folder, logs, board).run()
            except Exception:
                error = f"node {order.node} failed:\n{traceback.format_exc()}"
        return Ended(
            exits=exits,
            reports=_reports(board),
            error=error,
            logs={} if shared else _logs(logs),
            out_of_memory_kills=out_of_memory_kills() - kills_before,
        )


class _Ranks:
    """The ranks of one order on this node, below one ``torchrun``."""

    def __init__(self, order: Order, folder: Path, logs: Path, board: Board) -> None:
        self._order = order
        self._folder = folder
        self._board = board
        self._log = logs / f"node{order.node}.log"
        #: When ranks were first seen to have ended without a word.
        self._silent_since: dict[int, int] = {}
        (folder / "order.json").write_text(order.model_dump_json(), encoding="utf-8")
        launch = ranks.Launch(order.entry, _arguments(order, folder), logs, board)
        ranks.leave(launch, folder)

    def run(self) -> dict[int, RankExit]:
        """Run the ranks; returns those that ended by themselves, but not as they should.

        Raises ``RuntimeError`` with the end of its log if torchrun itself failed.
        """
        temporary = self._folder / "temporary"
        temporary.mkdir()
        with self._log.open("ab") as log:
            launched = subprocess.Popen(
                [*_TORCHRUN, str(self._folder), str(os.getpid())],
                cwd=provenance.ROOT,
                env=_environment(self._order) | {"TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            # Torchrun still runs where its ranks have all left with code 0: it then waits for the
            # other nodes' agents, and a rank that has left too early may be why they failed.
            return self._exits(launched.wait() if self._wait(launched.pid) else 0)
        finally:
            _end_descendants()
            launched.wait()

    def _wait(self, torchrun: int) -> bool:
        """Whether torchrun ends before the runner is done with it and the time is over."""
        deadline = time.monotonic() + self._order.at_most_s
        heard = time.monotonic()
        ended = os.pidfd_open(torchrun)
        try:
            while time.monotonic() < min(deadline, heard + SILENCE_S):
                ready, _, _ = select.select([ended, 0], [], [], _WATCH_INTERVAL_S)
                for rank in self._board.silent():
                    self._silent_since.setdefault(rank, time.monotonic_ns())
                if ended in ready:
                    return True
                if 0 in ready:
                    if not os.read(0, 1024):
                        return False
                    heard = time.monotonic()
            return False
        finally:
            os.close(ended)

    def _exits(self, code: int) -> dict[int, RankExit]:
        failures = self._folder / "failures.json"
        if code == 0:
            # Torchrun takes a rank that leaves with code 0 for one that has finished.
            codes = dict.fromkeys(self._silent_since, 0)
        elif failures.exists():
            codes = {int(rank): end for rank, end in json.loads(failures.read_text()).items()}
        else:
            quoted = self._log.read_bytes()[-_LONGEST_QUOTE:].decode("utf-8", errors="replace")
            raise RuntimeError(f"torchrun ended with exit code {code}:\n{quoted}")
        now = time.monotonic_ns()
        return {
            rank: RankExit(code=end, age_ns=now - self._silent_since.get(rank, now))
            for rank, end in codes.items()
        }


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, to find and end them all."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _end_descendants(within_s: float = 10.0) -> None:
    """Kill all that was started here, however deep, and wait until it is gone.

    What the kernel cannot end within ``within_s`` seconds (a device that hangs) stays.
    """
    deadline = time.monotonic() + within_s
    while left := _descendants():
        if time.monotonic() > deadline:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.01)


def _descendants() -> list[psutil.Process]:
    alive = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def _environment(order: Order) -> dict[str, str]:
    interface = _interface_with(order.address)
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        **provenance.without_secrets(os.environ),
        **order.environment,
    }


def _arguments(order: Order, folder: Path) -> tuple[str, ...]:
    """The function's arguments; files that this node does not see are written to ``folder``.

    A file of this node's own at the same place may be an earlier run's: what it says decides.
    """
    arguments = []
    for i, argument in enumerate(order.arguments):
        sent = order.files.get(argument)
        if sent is not None and not _says(Path(argument), sent):
            copy = folder / f"argument{i}"
            copy.write_text(sent, encoding="utf-8")
            argument = str(copy)
        arguments.append(argument)
    return tuple(arguments)


def _says(file: Path, text: str) -> bool:
    return file.is_file() and file.read_bytes() == text.encode()


def _reports(board: Board) -> list[RankReport]:
    now = time.monotonic_ns()
    said = [asdict(report) for report in board.reports()]
    return [RankReport(age_ns=now - each.pop("moment_ns"), **each) for each in said]


def _logs(directory: Path) -> dict[str, str]:
    texts = {}
    for file in sorted(directory.glob("*.log")):
        texts[file.name] = file.read_bytes()[-_LONGEST_LOG:].decode("utf-8", errors="replace")
    return texts


if __name__ == "__main__":
    main()
