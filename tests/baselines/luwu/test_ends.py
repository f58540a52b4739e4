"""Roles that end or hang: all others say so soon, and the server's files are whole."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.luwu import server, switch
from baselines.luwu.train import LuWu
from baselines.luwu.wire import SWITCH, Connection, Listener, Lost
from tests.baselines.cyclic.training import batch
from tests.baselines.luwu.training import (
    KEYS,
    SMALL,
    check_masters,
    connect,
    job_of,
    model_of,
    plan_of,
    step_in,
    trained,
)

#: Seconds of silence until a role is given up, and until all have ended after that.
PATIENCE_S, WITHIN_S = 3.0, 45.0
STEPS = 400
_context = multiprocessing.get_context("forkserver")


def _server(folder: Path, patience_s: float, pipe: Pipe) -> None:
    listener = Listener(KEYS, "127.0.0.1:0")
    pipe.send(listener.address)
    _telling(server.Server(listener, folder, patience_s).serve, pipe)


def _switch(to: str, workers: int, patience_s: float, pipe: Pipe) -> None:
    listener = Listener(KEYS, "127.0.0.1:0")
    pipe.send(listener.address)
    connection = Connection(KEYS, to, SWITCH)
    _telling(switch.Switch(listener, connection, workers, patience_s).serve, pipe)


def _worker(to: str, rank: int, workers: int, patience_s: float, steps: int, pipe: Pipe) -> None:
    torch.set_num_threads(1)

    def work() -> None:
        model = model_of(False)
        job = job_of(model, rank, workers, SMALL, torch.float32)
        worker = LuWu(model, job, partial(connect, to, patience_s=patience_s))
        for _ in range(steps):
            worker.step([batch(rank, worker.steps_done)])
            pipe.send(worker.steps_done)
        worker.close()

    _telling(work, pipe)


def _telling(function: Callable[[], None], pipe: Pipe) -> None:
    try:
        function()
    except Exception as error:
        pipe.send(error if isinstance(error, Lost) else Lost(repr(error)))


class _Process:
    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = _context.Pipe(duplex=False)
        self.process: Any = _context.Process(target=function, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, within_s: float = WITHIN_S) -> Any:
        assert self.pipe.poll(within_s), "says nothing"
        return self.pipe.recv()

    def last_words(self, within_s: float) -> BaseException:
        """The error that it ends with."""
        deadline = time.monotonic() + within_s
        while not isinstance(error := self.hear(max(0.0, deadline - time.monotonic())), Exception):
            pass
        return error

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def _running(folder: Path, steps: Sequence[int] = (STEPS, STEPS)) -> Iterator[dict[str, _Process]]:
    """All roles, with workers that leave after so many steps."""
    workers = len(steps)
    roles: dict[str, _Process] = {}
    try:
        roles["server"] = _Process(_server, folder, PATIENCE_S)
        roles["switch"] = _Process(_switch, roles["server"].hear(), workers, PATIENCE_S)
        address = roles["switch"].hear()
        for rank in range(workers):
            arguments = address, rank, workers, PATIENCE_S, steps[rank]
            roles[f"worker {rank}"] = _Process(_worker, *arguments)
        yield roles
    finally:
        for role in roles.values():
            role.end()


def _goes_on(folder: Path) -> None:
    """The files have a whole step, and training from it gives what it would without a stop."""
    step = step_in(folder)
    assert step >= 2
    plan, _ = trained(2, 1, folder, then=plan_of)
    check_masters(folder, plan, 2, step + 1)


def test_a_worker_that_leaves_before_the_others_ends_the_run(tmp_path: Path) -> None:
    """As one whose program fails does: it says goodbye, and beats no more."""
    with _running(tmp_path, (STEPS, 3)) as roles:
        for name in ("worker 0", "switch", "server"):
            error = roles[name].last_words(WITHIN_S)
            assert "worker 1 has left before the others were done" in str(error), name
    _goes_on(tmp_path)


@pytest.mark.parametrize(
    ("who", "how"),
    [("server", signal.SIGKILL), ("switch", signal.SIGSTOP), ("worker 1", signal.SIGKILL)],
)
def test_the_run_ends_in_all_roles_and_goes_on_from_the_files(
    who: str, how: int, tmp_path: Path
) -> None:
    """One role is stopped at some moment of training; the files are whole."""
    with _running(tmp_path) as roles:
        while roles["worker 0"].hear() < 3:
            pass
        time.sleep(0.05)
        roles[who].signal(how)
        for name, role in roles.items():
            if name != who:
                error = role.last_words(WITHIN_S)
                assert isinstance(error, Lost)
                assert who in str(error), (name, error)
    _goes_on(tmp_path)
