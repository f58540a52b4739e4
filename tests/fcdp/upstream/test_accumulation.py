"""Gradient accumulation as FSDP2 has it: with and without communication, and 1F1B."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fcdp
from fcdp.grouping import PartialsChoice
from tests.fcdp.upstream.models import Branches, mlps
from tests.fcdp.upstream.running import PAIR, Run, cases, steps


@cases(
    ("no_sync", True, True),
    ("no_sync", False, True),
    ("no_sync", True, False),
    ("every", True, True),
    ("every", False, False),
    ("some_modules", True, True),
    ("root_alone", True, True),
)
def test_gradients_of_several_micro_batches(
    run: Run, mode: str, reshard: bool, reshard_backward: bool
) -> None:
    """Three micro-batches per step, of which ``mode`` says which are reduced."""
    model = run.set_up(mlps(3, 5), reshard_after_forward=reshard)
    for step in steps(run, model):
        for micro in range(3):
            last = micro == 2
            if mode == "no_sync":
                model.set_requires_gradient_sync(last)
            elif mode == "some_modules":
                model[0].set_requires_gradient_sync(last)
            elif mode == "root_alone":
                model.set_requires_gradient_sync(last, recurse=False)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or reshard_backward)
            loss = model(run.input(4, 5, step=10 * step + micro)).sum()
            run.see(f"loss {step}.{micro}", loss)
            loss.backward()
            if not last:
                run.settle()  # FSDP2 waits for reductions in the last backward alone
            run.see_gradients(model)


@cases((False, True), (True, True), (False, False))
def test_forwards_of_all_micro_batches_before_their_backwards(
    run: Run, async_op: bool, keep: bool
) -> None:
    """Pipelines run forwards of micro-batches ahead of their backwards."""
    model = mlps(3, 5)
    run.shard([*model, model], reshard_after_forward=False)
    if async_op:
        model._set_unshard_async_op(True)
    run.cache(model)
    count = 3
    for step in steps(run, model, 2):
        losses = [model(run.input(4, 5, step=10 * step + micro)).sum() for micro in range(count)]
        for micro, loss in enumerate(losses):
            last = micro == count - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or not keep)
            loss.backward()


@cases((True,), (False,), shapes=[PAIR])
def test_accumulation_in_the_reduce_dtype(run: Run, reshard: bool) -> None:
    """Compute in bf16, accumulation and reduction in fp32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = run.set_up(
        mlps(3, 8).to(torch.float32), reshard_after_forward=reshard, mp_policy=policy
    )
    for step in steps(run, model):
        for micro in range(4):
            model.set_requires_gradient_sync(micro == 3)
            loss = model(run.input(4, 8, step=10 * step + micro)).sum()
            run.see(f"loss {step}.{micro}", loss)
            loss.backward()
        for param in model.parameters():
            assert param.grad.dtype == torch.float32


@cases()
def test_evaluation_between_micro_batches(run: Run) -> None:
    model = run.set_up(mlps(2, 5))
    for step in steps(run, model):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model(run.input(4, 5, step=10 * step + micro)).sum().backward()
            with torch.no_grad():
                run.see("evaluated", model(run.input(4, 5, step=99)))


@cases(("every",), ("no_sync",))
def test_a_unit_that_the_last_micro_batch_leaves_out(run: Run, mode: str) -> None:
    model = run.set_up(Branches(6))
    for step in steps(run, model):
        for micro in range(2):
            if mode == "no_sync":
                model.set_requires_gradient_sync(micro == 1)
            used = "left" if micro else "left right"
            model(run.input(4, 6, step=10 * step + micro), used=used).sum().backward()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "finalize_backward"), reason="finalize_backward comes with torch 2.15"
)
@cases(
    *[(False, None), (True, None), (False, "device"), (True, "device")],
    *[(False, "host"), (True, "each")],
)
def test_backward_is_finalized_by_hand(
    run: Run, waits_later: bool, place: PartialsChoice | None
) -> None:
    """Two micro-batches, of which FSDP2 reduces the gradients after the second's backward.

    ``place``: of the sums under ``fcdp.accumulate``; ``None`` without it.
    """
    run.comm = fcdp.CommOptions(partial_gradients=place or "auto")
    model: Any = run.set_up(mlps(3, 5))
    model.set_manual_backward_finalization(True)
    for step in steps(run, model):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            together = place is not None and run.cached
            with fcdp.accumulate(model, last=last) if together else nullcontext():
                model(run.input(4, 5, step=10 * step + last)).sum().backward()
                if last and (handle := model.finalize_backward(async_op=waits_later)):
                    handle.wait()
