"""DeepSpeed's operators are compiled by one rank at a time, and no lock is left behind."""

import fcntl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch


def build_operators() -> None:
    # Imported when a test first needs it: DeepSpeed takes seconds.
    from baselines.deepspeed import engine

    engine.build_operators()


class Operator:
    """Stands in for DeepSpeed's builder of an operator; sees whether the lock is held."""

    name = "operator"

    def __init__(self, lock: Path) -> None:
        self.lock = lock
        self.loads = 0
        self.inside = threading.Lock()

    def load(self, verbose: bool) -> None:
        assert not verbose
        self.loads += 1
        assert self.inside.acquire(blocking=False), "two at a time"
        assert is_locked(self.lock)
        self.inside.release()


def is_locked(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Operator:
    from deepspeed.ops.op_builder import cpu

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    operator = Operator(tmp_path / "operators" / "operator.lock")
    monkeypatch.setattr(cpu, "ShareMemCommBuilder", lambda: operator)
    return operator


def test_the_operator_is_built_by_one_rank_at_a_time(operator: Operator) -> None:
    with ThreadPoolExecutor(8) as ranks:
        built = [ranks.submit(build_operators) for _ in range(8)]
    assert [each.result() for each in built] == [None] * 8
    assert operator.loads == 8
    assert not is_locked(operator.lock)


def test_it_is_built_in_the_environment_that_it_belongs_to(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    build_operators()
    assert (operator.loads, is_locked(operator.lock)) == (1, False)


def test_a_build_that_fails_frees_the_lock(operator: Operator) -> None:
    operator.inside.acquire()
    with pytest.raises(AssertionError, match="two at a time"):
        build_operators()
    assert not is_locked(operator.lock)


def test_the_lock_of_a_build_that_was_killed_is_removed(operator: Operator, tmp_path: Path) -> None:
    left = tmp_path / "operators" / operator.name / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    build_operators()
    assert operator.loads == 1
    assert not left.exists()
