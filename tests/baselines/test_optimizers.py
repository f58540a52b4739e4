"""The optimizers of cells, and their learning rates over the steps."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from baselines import optimizers
from baselines.optimizers import SGD, AdamW, AnyOptimizer, Cosine, Decay

#: Weight decay of some of them.
OF: dict[str, Any] = {"weight_decay": 0.1}
DECAYED = SGD(kind="sgd", momentum=0.5, weight_decay=0.1, decay=Decay(every=2, by=0.1))


def made(chosen: AnyOptimizer) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.ones(3))
    return param, optimizers.make(chosen, [param], 0.5)


def rates(chosen: AnyOptimizer, steps: int, state: Any = None) -> list[float]:
    """Learning rates by step, on from an optimizer's state."""
    param, optimizer = made(chosen)
    if state is not None:
        optimizer.load_state_dict(state)
    by_step = []
    for _ in range(steps):
        param.grad = torch.ones(3)
        optimizer.step()
        by_step.append(optimizer.param_groups[0]["lr"])
    return by_step


def test_learning_rates() -> None:
    assert rates(AdamW(), 3) == [0.5] * 3
    assert rates(DECAYED, 5) == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    warm = rates(AdamW(inverse_sqrt_after=4), 16)
    assert warm[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert warm[15] == pytest.approx(0.25)
    cosine = rates(AdamW(cosine=Cosine(warm_up=2, end=6)), 8)
    assert cosine[:2] == pytest.approx([0.25, 0.5])
    assert cosine[4] == pytest.approx(0.25)
    assert cosine[6:] == [0.0, 0.0]


def test_a_schedule_that_cannot_be_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="end = 4: allowed are those above warm_up = 4"):
        Cosine(warm_up=4, end=4)
    with pytest.raises(ValueError, match="allowed is it alone"):
        AdamW(inverse_sqrt_after=4, cosine=Cosine(warm_up=2, end=6))


@pytest.mark.parametrize(
    ("chosen", "usual", "options"),
    [
        (AdamW(), torch.optim.AdamW, {}),
        (AdamW(beta2=0.98, **OF), torch.optim.AdamW, {"betas": (0.9, 0.98), **OF}),
        (SGD(kind="sgd", momentum=0.5, **OF), torch.optim.SGD, {"momentum": 0.5, **OF}),
    ],
)
def test_they_step_as_pytorchs_do(
    chosen: AnyOptimizer, usual: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    param, optimizer = made(chosen)
    other = nn.Parameter(torch.ones(3))
    reference = usual([other], lr=0.5, **options)
    for scale in (1.0, 2.0, -1.0):
        param.grad = other.grad = torch.arange(3) * scale
        optimizer.step()
        reference.step()
        torch.testing.assert_close(param, other)


def test_a_schedule_goes_on_where_a_checkpoint_was_taken() -> None:
    param, optimizer = made(DECAYED)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert rates(DECAYED, 2, optimizer.state_dict()) == pytest.approx([0.05, 0.005])


@pytest.mark.parametrize("chosen", [AdamW(), SGD(kind="sgd")])
@pytest.mark.parametrize("accelerator", [True, False])
def test_offloaded_parameters_step_by_the_vectorised_loop(
    chosen: AnyOptimizer, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    _, optimizer = made(chosen)
    assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (
        accelerator,
        not accelerator,
    )
