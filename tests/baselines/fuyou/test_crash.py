"""Whenever a run ends, the last complete step is there, and the run goes on from it exactly."""

import errno
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from baselines.fuyou.train import Fuyou, build
from baselines.settings import Update
from tests import programs
from tests.baselines.fuyou.training import in_memory, made, same, settings, state, steps
from tests.baselines.training import batches_of, built
from tests.ranks import Pools, on_ranks

_context = multiprocessing.get_context("forkserver")


def begun(
    folder: Path, count: int, update: Update = "delayed", layers: int = 3
) -> tuple[Fuyou, Iterator[torch.Tensor]]:
    """A training that has taken so many steps, and its batches."""
    trainer, batches = Fuyou(*made(settings(update=update), layers=layers), folder), batches_of()
    steps(trainer, count, batches)
    return trainer, batches


def goes_on(folder: Path, update: Update = "delayed", layers: int = 3) -> int:
    """The last complete step in a folder, whose state is there, and from which a run goes on."""
    trainer, batches = begun(folder, 0, update, layers)
    done = trainer.steps_done
    same(state(trainer), in_memory(done, layers=layers)[1])
    for _ in range(done):
        next(batches)
    steps(trainer, 1, batches)
    same(state(trainer), in_memory(done + 1, layers=layers)[1])
    trainer.close()
    return done


def test_a_run_that_is_killed_goes_on_from_its_last_step(
    ranks: Pools, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    times = 20 if request.config.getoption("--exhaustive") else 1
    for attempt in range(times):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        pipe, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_endless, args=(folder, theirs), daemon=True)
        process.start()
        theirs.close()
        while pipe.recv() < 2:  # nothing, where the run ended by itself
            pass
        # Anywhere in the steps that follow.
        time.sleep(random.uniform(0, 0.5))
        assert process.is_alive()
        process.kill()
        process.join()
        assert ranks.run(1, goes_on, folder)[0] >= 2


def _endless(folder: Path, pipe: Connection) -> None:
    """Train until somebody ends it, and tell of each step."""
    _alone()
    trainer, batches = begun(folder, 0)
    while True:
        steps(trainer, 1, batches)
        pipe.send(trainer.steps_done)


def _alone() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)  # as ranks of tests: sums of several threads have other bits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_program_that_ends_without_a_word_writes_its_last_step_or_says_that_it_does_not_count(
    ranks: Pools, tmp_path: Path
) -> None:
    """Python ends threads' pools before the writes that are delayed have begun."""
    program = f"from {__name__} import programs_end; programs_end({str(tmp_path)!r})"
    errors = programs.ended(sys.executable, "-c", program).stderr
    done = [ranks.run(1, goes_on, tmp_path / name, "delayed", 1) for name in ("written", "failed")]
    assert done == [[4], [3]], errors
    assert errors.count("the last step does not count: [Errno 5] Input/output error") == 1


def programs_end(folder: str) -> None:
    """Train in two programs, of which this one has imported all; writes of the second fail."""
    built("gpt2")
    for name in ("written", "failed"):
        Path(folder, name).mkdir()
        if not os.fork():
            return _end(Path(folder, name), name == "failed")
        os.wait()
    return None


def _end(folder: Path, fails: bool) -> None:
    """Train four steps, whose last writes wait until the program ends."""
    _alone()
    trainer, batches = begun(folder, 3, layers=1)
    trainer.settle()
    write = os.pwritev
    first = iter([True])

    def late(*arguments: object) -> int:
        if next(first, False):
            # There are buffers for all groups: the step ends while this write goes on.
            while not pools._shutdown:
                time.sleep(0.01)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)  # type: ignore[arg-type]

    os.pwritev = late
    steps(trainer, 1, batches)


@pytest.mark.parametrize("update", ["after", "delayed"])
@on_ranks(1)
def test_a_write_that_fails_is_an_error_and_the_step_before_stays(
    tmp_path: Path, update: Update
) -> None:
    trainer, batches = begun(tmp_path, 2, update)
    trainer.settle()
    write, count = os.pwritev, 0

    def failing(*arguments: object) -> int:
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments)  # type: ignore[arg-type]

    with mock.patch("os.pwritev", failing), pytest.raises(OSError, match="Input/output error"):
        steps(trainer, 1, batches)
        trainer.settle()
    with suppress(OSError):
        trainer.close()
    assert goes_on(tmp_path, update) == 2


@on_ranks(1)
def test_after_a_step_that_failed_the_one_before_is_waited_for(tmp_path: Path) -> None:
    trainer, batches = begun(tmp_path, 3)
    write = os.pwritev

    def slow(*arguments: object) -> int:
        time.sleep(0.05)
        return write(*arguments)  # type: ignore[arg-type]

    with mock.patch("os.pwritev", slow):
        steps(trainer, 1, batches)
        with pytest.raises(RuntimeError):  # the model's own
            trainer.step([next(batches).to(torch.float32)])
        with pytest.raises(RuntimeError, match="a step failed; .* to go on from step 4"):
            steps(trainer, 1, batches)
    trainer.close()
    trainer.close()
    assert goes_on(tmp_path, "after") == 4


@on_ranks(1)
def test_a_run_whose_step_fails_leaves_no_state(tmp_path: Path) -> None:
    trainer = build(*made(settings(ssd=str(tmp_path))))
    assert any(tmp_path.iterdir())
    with pytest.raises(RuntimeError):  # the model's own
        trainer.step([next(batches_of()).to(torch.float32)])
    assert not any(tmp_path.iterdir())
