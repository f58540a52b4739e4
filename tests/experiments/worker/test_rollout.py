"""A rollout beside the ranks: its answers are the trainer's, and errors end what waits for it."""

import os
from typing import Any
from unittest import mock

import pytest

from baselines.description import ExtraProcess
from experiments.records.objective import GRPO
from tests.experiments.cells import CellResult, Runner, model_spec

HERE = "tests.experiments.worker.test_rollout"
SETTINGS = {
    "model": model_spec("gpt2", layers=1, width=32, heads=2),
    "sequence_length": 16,
    "micro_batch": 4,
    "inter_bandwidth_bits_per_s": 5 * 10**6,
}


def generated(run: Runner, rollout: str, *entry: str, **settings: Any) -> CellResult:
    """Run a cell whose answers come from this ``rollout``."""
    objective = GRPO(kind="grpo", new_tokens=6, group=4, rollout=rollout)
    return run("fcdp", *entry, objective=objective, **SETTINGS, **settings)


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_answers_are_the_trainers_bit_for_bit(run: Runner, tuning: str) -> None:
    """Tokens decide rewards, and they and the old probabilities losses; publications cross."""
    settings = {"tuning": tuning, "dtype": "bfloat16"}
    inside, beside = (
        generated(run, name, **settings).measurement for name in ("trainer", "process")
    )
    assert beside.losses == inside.losses
    assert beside.rewards == inside.rewards
    assert len({*inside.rewards}) > 1
    assert (beside.versions_behind, inside.versions_behind) == (0, None)
    assert beside.changed_share
    assert beside.bits_per_parameter
    assert beside.sync_bytes
    published = beside.bits_per_parameter * beside.trainable_parameters / 8
    assert published < beside.sync_bytes < 2 * published + 30_000


def test_answers_may_be_a_version_behind(run: Runner) -> None:
    measured = generated(run, "behind").measurement
    assert measured.versions_behind == 1
    assert measured.generation_bytes is not None


def fail_in_mid_answer() -> None:
    """The rollout, but it raises before it gives its second answers."""
    from experiments.worker.objectives import rollout

    answer = rollout._Generation.answer

    def once(*arguments: Any) -> Any:
        rollout._Generation.answer = _interrupted
        return answer(*arguments)

    rollout._Generation.answer = once  # type: ignore[method-assign]
    rollout.main()


def _interrupted(*_: Any) -> Any:
    raise MemoryError("no room for keys and values")


def test_a_rollout_that_fails_ends_the_ranks_and_says_why(run: Runner) -> None:
    broken = ExtraProcess("rollout", f"{HERE}:fail_in_mid_answer")
    with mock.patch.object(GRPO, "extra", (broken,)):
        result = generated(run, "process")
    assert result.outcome.state == "failed"
    assert "rollout: " in str(result.outcome.error)
    assert "no room for keys and values" in str(result.outcome.error)


def interrupted_worker(cell_file: str, output_directory: str) -> None:
    """The worker; one rank raises while it draws its third token."""
    import torch

    from experiments.worker import worker

    draw, calls = torch.multinomial, iter(range(10**6))

    def draw_or_raise(*arguments: Any, **options: Any) -> torch.Tensor:
        if os.environ["RANK"] == "2" and next(calls) == 2:
            raise KeyboardInterrupt("in mid generation")
        return draw(*arguments, **options)

    with mock.patch.object(torch, "multinomial", draw_or_raise):
        worker.main(cell_file, output_directory)


def test_an_interrupted_generation_ends_all_ranks(run: Runner) -> None:
    result = generated(run, "trainer", f"{HERE}:interrupted_worker")
    assert result.outcome.state == "failed"
    assert "in mid generation" in str(result.outcome.error)
    assert result.seconds < 120, "none waits for its time limit"
