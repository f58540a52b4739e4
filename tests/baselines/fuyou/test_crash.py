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
from tests import programs
from tests.baselines.fuyou.training import in_memory, made, same, settings, state, steps
from tests.baselines.training import batches_of, built
from tests.ranks import Pools, on_ranks

_context = multiprocessing.get_context("forkserver")


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
        ranks.run(1, _goes_on, folder)


def _endless(folder: Path, pipe: Connection) -> None:
    """Train until somebody ends it, and tell of each step."""
    _alone()
    trainer = Fuyou(*made(settings()), folder)
    batches = batches_of()
    while True:
        steps(trainer, 1, batches)
        pipe.send(trainer.steps_done)


def _alone() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)  # as ranks of tests: sums of several threads have other bits
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _goes_on(folder: Path) -> None:
    trainer = Fuyou(*made(settings()), folder)
    done = trainer.steps_done
    assert done >= 2
    same(state(trainer), in_memory(done)[1])
    batches = batches_of()
    for _ in range(done):
        next(batches)
    steps(trainer, 1, batches)
    same(state(trainer), in_memory(done + 1)[1])


def test_a_program_that_ends_without_a_word_writes_its_last_step_or_says_that_it_does_not_count(
    ranks: Pools, tmp_path: Path
) -> None:
    """Python ends threads' pools before the writes that are delayed have begun."""
    program = f"from {__name__} import programs_end; programs_end({str(tmp_path)!r})"
    errors = programs.ended(sys.executable, "-c", program).stderr
    done = [ranks.run(1, _done, tmp_path / name) for name in ("written", "failed")]
    assert done == [[4], [3]], errors
    assert errors.count("the last step does not count: [Errno 5] Input/output error") == 1


def _done(folder: Path) -> int:
    trainer = Fuyou(*made(settings(update="delayed"), layers=1), folder)
    same(state(trainer), in_memory(trainer.steps_done, layers=1)[1])
    trainer.close()
    return trainer.steps_done


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
    trainer = Fuyou(*made(settings(update="delayed"), layers=1), folder)
    batches = batches_of()
    steps(trainer, 3, batches)
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
    tmp_path: Path, update: str
) -> None:
    trainer = Fuyou(*made(settings(update=update)), tmp_path)
    batches = batches_of()
    steps(trainer, 2, batches)
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
    again = Fuyou(*made(settings(update=update)), tmp_path)
    assert again.steps_done == 2
    same(state(again), in_memory(2)[1])
    again.close()


@on_ranks(1)
def test_after_a_step_that_failed_the_one_before_is_waited_for(tmp_path: Path) -> None:
    trainer = Fuyou(*made(settings(update="delayed")), tmp_path)
    batches = batches_of()
    steps(trainer, 3, batches)
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
    again = Fuyou(*made(settings(update="after")), tmp_path)
    same(state(again), in_memory(4)[1])
    again.close()


@pytest.fixture
def small_disk(privileged: None, tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    programs.printed("mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path)
    yield tmp_path
    programs.printed("umount", "-l", tmp_path)


@on_ranks(1)
def test_a_full_disk_is_refused_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(ValueError, match=r"ssd = .*: .* are needed \(No space left on device\)"):
        Fuyou(*made(settings()), small_disk)
    assert not any(small_disk.iterdir())


@on_ranks(1)
def test_a_run_whose_step_fails_leaves_no_state(tmp_path: Path) -> None:
    trainer = build(*made(settings(ssd=str(tmp_path))))
    assert any(tmp_path.iterdir())
    with pytest.raises(RuntimeError):  # the model's own
        trainer.step([next(batches_of()).to(torch.float32)])
    assert not any(tmp_path.iterdir())
