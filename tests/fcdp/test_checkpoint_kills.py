"""Ranks that are killed in the middle of a save leave the old checkpoint or the new one.

The suite kills at three places of a save, ``pytest --exhaustive`` at twenty.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fcdp.checkpoints import Run, assert_equal, kill_at, on_each_change
from tests.ranks import Pools, RankFailure, RankPool

pytestmark = pytest.mark.ranks


def count_changes(directory: Path) -> int:
    """Steps of a save over another one."""
    run = Run()
    run.train(1)
    run.save(directory)
    run.train(1)
    steps: list[None] = []
    on_each_change(directory, lambda: steps.append(None))
    run.save(directory)
    return len(steps)


def step_and_save(directory: Path, rank: int, killed_at: int) -> None:
    """Take up the run, go one step further and save; one rank kills itself before that is over."""
    run = Run(seed=1)
    run.load(directory)
    run.train(1)
    if run.topology.rank == rank:
        kill_at(directory, killed_at)
    run.save(directory)


def parameters_by_step(directory: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    """Of a run that nothing disturbs; its start is saved."""
    run = Run()
    run.save(directory)
    history = [run.params()]
    for _ in range(steps):
        run.train(1)
        history.append(run.params())
    return history


def load(directory: Path) -> tuple[int, dict[str, torch.Tensor]]:
    run = Run(seed=2)
    run.load(directory)
    return run.position, run.params()


def test_kills_leave_the_old_checkpoint_or_the_new(
    ranks: Pools, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "run"
    exhaustive = request.config.getoption("--exhaustive")
    counting = RankPool(2)
    counts = counting.run(count_changes, tmp_path / "counted")
    counting.close()
    # Ten all over the shards, on both ranks, and the last ten: description, commit, removal.
    chosen = [(i % 2, 1 + i * counts[i % 2] // 10) for i in range(10)]
    chosen += [(0, counts[0] - left) for left in reversed(range(10))]
    if not exhaustive:
        chosen = chosen[5::7]
    expected = ranks.run(2, parameters_by_step, directory, len(chosen))[0]
    position = 0
    outcomes = []
    for rank, step in chosen:
        pool = RankPool(2)
        with pytest.raises(RankFailure, match="its process has ended"):
            pool.run(step_and_save, directory, rank, step)
        pool.close()
        found, params = ranks.run(2, load, directory)[0]
        assert found in (position, position + 1), (rank, step)
        assert_equal(params, expected[found])
        outcomes.append(found - position)
        position = found
    assert set(outcomes) == {0, 1}, list(zip(chosen, outcomes, strict=True))
