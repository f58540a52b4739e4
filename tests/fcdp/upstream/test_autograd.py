"""Outputs, modules and parameters that a loss leaves out."""

from __future__ import annotations

import torch

from tests.fcdp.upstream.models import Branches, DoubleLinear
from tests.fcdp.upstream.running import Run, adam, cases, train


@cases((True,), (False,))
def test_an_output_that_the_loss_leaves_out(run: Run, reshard: bool) -> None:
    """The second of two outputs falls out of the loss in mid-run."""
    model = DoubleLinear(24, use_second=True)
    run.shard([model.lin1, model], reshard_after_forward=reshard)
    run.cache(model)

    def loss(step: int) -> torch.Tensor:
        first, second = model(run.input(2, 24, step=step))
        return (first * second).sum() if step < 2 else first.sum()

    train(run, model, adam(model), loss)


@cases((True,), (False,))
def test_a_module_that_never_runs(run: Run, reshard: bool) -> None:
    model = DoubleLinear(24, use_second=False)
    run.shard([model.lin1, model.lin2, model], reshard_after_forward=reshard)
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(2, 24, step=step)).sum())


@cases()
def test_other_parameters_receive_gradients_in_each_step(run: Run) -> None:
    """Parameters of one group receive gradients in turn, alike on all ranks."""
    model = Branches(6)
    run.shard([model])
    run.cache(model)
    train(
        run,
        model,
        adam(model),
        lambda step: model(run.input(2, 6, step=step), used=("left", "right")[step % 2]).sum(),
    )


@cases()
def test_ranks_use_different_parameters_of_a_group(run: Run) -> None:
    """Ranks use different parameters of a group, which then sends zeros for the others."""
    model = Branches(6)
    run.shard([model])
    model.set_reduce_scatter_unused_params(True)
    run.cache(model)
    used = ("left", "right")[run.topology.rank % 2]
    train(run, model, adam(model), lambda step: model(run.input(2, 6, step=step), used=used).sum())
