"""LuWu beside single-process Adam, bit for bit, and what workers hold meanwhile."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.luwu.port import Port
from baselines.luwu.train import LuWu
from baselines.settings import LuWuSettings
from tests.baselines.cyclic.training import batch, loss
from tests.baselines.luwu.training import (
    SMALL,
    check_masters,
    model_of,
    plan_of,
    reference,
    trained,
)
from tests.baselines.training import noting

STEPS = 6


@pytest.mark.parametrize(
    ("workers", "dtype", "frozen", "settings"),
    [
        (1, torch.float32, False, SMALL),
        (2, torch.float32, False, SMALL.model_copy(update={"pipeline": "layer"})),
        (3, torch.bfloat16, False, SMALL.model_copy(update={"threads": 6})),
        (4, torch.float32, False, SMALL.model_copy(update={"merged": False})),
        (2, torch.float32, True, SMALL),
        (2, torch.float32, True, SMALL.model_copy(update={"cached": True})),
        (2, torch.bfloat16, True, LuWuSettings()),
    ],
)
def test_parameters_are_those_of_single_process_adam(
    workers: int, dtype: torch.dtype, frozen: bool, settings: LuWuSettings, tmp_path: Path
) -> None:
    model: Any = {"dtype": dtype, "frozen": frozen}
    plan, *_ = trained(workers, STEPS, tmp_path, settings=settings, then=plan_of, **model)
    check_masters(tmp_path, plan, workers, STEPS, **model)


def test_evaluations_between_steps_see_the_newest_parameters_and_change_none(
    tmp_path: Path,
) -> None:
    expected = model_of(False)
    plans = []

    def evaluate(worker: LuWu) -> torch.Tensor:
        first, second = (worker.evaluate(batch(9, 0)) for _ in range(2))
        assert torch.equal(first, second)
        worker.step([batch(worker._rank, worker.steps_done)])
        plans.append(plan_of(worker))
        return first

    losses = trained(2, 3, tmp_path, then=evaluate)
    expected.load_state_dict(reference(2, 3), strict=False)
    expected.head.weight = expected.embedding.weight
    with torch.no_grad():
        assert torch.equal(losses[0], loss(expected, batch(9, 0)))
    check_masters(tmp_path, plans[0], 2, 4)


def test_a_worker_holds_two_layers_at_most(tmp_path: Path) -> None:
    most = []

    def released(port: Port) -> None:
        layers = port._land.__self__._layers  # type: ignore[attr-defined]
        there = [any(part.is_there and part.numel for part in layer.parts) for layer in layers]
        most.append(1 + sum(there))  # the one that is let go is freed already

    with noting(Port, "release", released):
        trained(2, 3, tmp_path)
    assert max(most) <= 2
