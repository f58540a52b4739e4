"""Roles that end or hang: all others say so soon, and the server's files are whole."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
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
WORKERS, STEPS = 2, 400
_context = multiprocessing.get_context("forkserver")


def _server(folder: Path, pipe: Pipe) -> None:
    listener = Listener(KEYS, "127.0.0.1:0")
    pipe.send(listener.address)
    _telling(server.Server(listener, folder, PATIENCE_S).serve, pipe)


def _switch(to: str, pipe: Pipe) -> None:
    listener = Listener(KEYS, "127.0.0.1:0")
    pipe.send(listener.address)
    connection = Connection(KEYS, to, SWITCH)
    _telling(switch.Switch(listener, connection, WORKERS, PATIENCE_S).serve, pipe)


def _worker(to: str, rank: int, pipe: Pipe) -> None:
    torch.set_num_threads(1)

    def work() -> None:
        model = model_of(False)
        job = job_of(model, rank, WORKERS, SMALL, torch.float32)
        worker = LuWu(model, job, partial(connect, to, patience_s=PATIENCE_S))
        for _ in range(STEPS):
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

    def last_words(self) -> BaseException:
        """The error that it ends with."""
        deadline = time.monotonic() + WITHIN_S
        while not isinstance(error := self.hear(max(0.0, deadline - time.monotonic())), Exception):
            pass
        return error


@contextmanager
def _running(folder: Path) -> Iterator[dict[str, _Process]]:
    """All roles, by name."""
    roles: dict[str, _Process] = {}
    try:
        roles["server"] = _Process(_server, folder)
        roles["switch"] = _Process(_switch, roles["server"].hear())
        address = roles["switch"].hear()
        for rank in range(WORKERS):
            roles[f"worker {rank}"] = _Process(_worker, address, rank)
        yield roles
    finally:
        for role in roles.values():
            role.process.kill()
            role.process.join()


@pytest.mark.parametrize(
    ("who", "how"),
    [("server", signal.SIGKILL), ("switch", signal.SIGSTOP), ("worker 1", signal.SIGKILL)],
)
def test_the_run_ends_in_all_roles_and_goes_on_from_the_files(
    who: str, how: int, tmp_path: Path
) -> None:
    """One role is stopped at some moment of training; the files have a whole step."""
    with _running(tmp_path) as roles:
        while roles["worker 0"].hear() < 3:
            pass
        time.sleep(0.05)
        os.kill(roles[who].process.pid, how)
        for name, role in roles.items():
            if name != who:
                error = role.last_words()
                assert isinstance(error, Lost)
                assert who in str(error), (name, error)
    step = step_in(tmp_path)
    assert step >= 2
    plan, _ = trained(WORKERS, 1, tmp_path, then=plan_of)
    check_masters(tmp_path, plan, WORKERS, step + 1)
