"""A rollout beside the ranks: its answers are the trainer's, and ranks that end end it."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from experiments.records.cell import Cell
from experiments.records.objective import GRPO
from experiments.records.record import Measurement
from tests.experiments.cells import Runner, model_spec
from tests.experiments.stand_in import cell

SETTINGS = {
    "model": model_spec("gpt2", layers=1, width=32, heads=2),
    "sequence_length": 16,
    "micro_batch": 4,
    "inter_bandwidth_bits_per_s": 5 * 10**6,
}


def generated(run: Runner, rollout: str, **settings: Any) -> Measurement:
    """Run a cell whose answers come from there."""
    objective = GRPO(kind="grpo", new_tokens=6, group=4, rollout=rollout)
    return run("fcdp", objective=objective, **SETTINGS, **settings).measurement


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_answers_are_the_trainers_bit_for_bit(run: Runner, tuning: str) -> None:
    """Tokens decide rewards, and they and the old probabilities losses; publications cross."""
    settings = {"tuning": tuning, "dtype": "bfloat16"}
    inside, beside = (generated(run, name, **settings) for name in ("trainer", "process"))
    assert beside.losses == inside.losses
    assert beside.rewards == inside.rewards
    assert len({*inside.rewards}) > 1
    assert (beside.versions_behind, inside.versions_behind) == (0, None)
    assert beside.changed_share
    assert beside.bits_per_parameter
    assert beside.sync_bytes
    told = beside.bits_per_parameter * beside.trainable_parameters / 8
    assert told < beside.sync_bytes < 2 * told + 30_000


def test_answers_may_be_a_version_behind(run: Runner) -> None:
    measured = generated(run, "behind")
    assert measured.versions_behind == 1
    assert measured.generation_bytes is not None


class _Rank:
    """A rank's end of a connection: what it sent before it ended, or went on to wait."""

    def __init__(self, cell: Cell, *, ended: bool) -> None:
        self._sent: list[Any] = [(0, cell.model_dump_json(), "http://nowhere"), 1]
        self._ended = ended

    def recv(self) -> Any:
        if not self._sent:
            raise EOFError
        return self._sent.pop(0)

    def send(self, _: Any) -> None:
        pass

    def poll(self, _: float) -> bool:
        return self._ended


@pytest.mark.parametrize("ended", [True, False])
def test_what_ranks_that_end_cut_off_is_no_failure(
    ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication that is read as the node which serves it ends."""
    from experiments.worker.objectives import rollout

    listener, generation = mock.MagicMock(), mock.Mock()
    listener.__enter__.return_value.accept.return_value = _Rank(
        cell(objective=GRPO(kind="grpo", new_tokens=6, group=4), micro_batch=4), ended=ended
    )
    generation.follow.side_effect = ValueError("not enough data")
    monkeypatch.setattr(rollout, "Listener", lambda *_, **__: listener)
    monkeypatch.setattr(rollout, "_Generation", lambda *_: generation)
    for name, value in (("RUN_SECRET", "00"), ("ROLLOUT", "localhost:1")):
        monkeypatch.setenv(f"FCDP_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with nullcontext() if ended else pytest.raises(ValueError, match="not enough data"):
        rollout.main()
