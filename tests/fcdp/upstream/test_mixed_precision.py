"""Casts of parameters, inputs and outputs: by module, in several dtypes, with odd sub-modules."""

from contextlib import nullcontext
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from tests.fcdp.releases import since_2_12
from tests.fcdp.upstream.models import MLP, mlps
from tests.fcdp.upstream.running import PAIR, Run, cases, steps, train_on

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Sums in bf16 depend on their order: on two ranks there is one.
ON_TWO = [PAIR]


@cases(
    *(
        (*dtypes, reshard)
        for dtypes in [(BF16, None), (FP16, None), (BF16, FP32), (None, BF16), (FP32, BF16)]
        for reshard in (True, False)
    ),
    shapes=ON_TWO,
)
def test_compute_and_reduce_dtypes(run: Run, param: Any, reduce: Any, reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    model = run.set_up(mlps(3, 16), reshard_after_forward=reshard, mp_policy=policy)
    train_on(run, model, 4, 16)


class Saving(nn.Module):
    """Keeps the dtypes of what each of its layers was called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes["self"] = x.dtype
        x = self.first(x)
        self.dtypes["second"] = x.dtype
        return self.second(x)


@cases(
    (True, FP16, None), (False, FP32, None), (True, FP32, BF16), (True, FP16, FP32), shapes=ON_TWO
)
def test_each_module_casts_for_itself(run: Run, root_casts: bool, second: Any, output: Any) -> None:
    model = Saving()
    run.shard([model.first], mp_policy=MixedPrecisionPolicy(BF16))
    run.shard([model.second], mp_policy=MixedPrecisionPolicy(second, output_dtype=output))
    run.set_up(model, [model], mp_policy=MixedPrecisionPolicy(BF16, cast_forward_inputs=root_casts))
    for step in range(2):
        y = model(run.input(4, 8, step=step))
        run.see("output", y)
        run.see("dtypes", (dict(model.dtypes), y.dtype))
        y.float().sum().backward()
    run.see_gradients(model)


class Mixed(nn.Module):
    """Parameters of two dtypes, one of them not floating and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.table = nn.Parameter(torch.arange(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.table.to(x.dtype).mean()


@since_2_12
@cases(shapes=ON_TWO)
def test_an_integer_parameter_and_a_late_thaw(run: Run) -> None:
    """One layer is frozen in the first forward, and thaws afterwards."""
    model = Mixed()
    run.set_up(model, [model], mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model.layers[0].requires_grad_(False)
    with torch.no_grad():
        run.see("evaluated", model(run.input(4, 16)))
    model.layers.requires_grad_(True)
    for step in range(2):
        model(run.input(4, 16, step=step)).sum().backward()
        run.see_gradients(model)


@cases(shapes=ON_TWO)
def test_frozen_parameters_of_another_dtype_in_one_group(run: Run) -> None:
    """bf16 weights that are frozen beside fp32 ones that are trained, gathered as they are."""
    torch.manual_seed(42)
    model = nn.Sequential(MLP(8), MLP(8))
    for mlp in model:
        mlp.in_proj.to(BF16).requires_grad_(False)
    run.set_up(model)
    for step in steps(run, model):
        with torch.autocast("cpu", BF16):
            loss = model(run.input(4, 8, step=step)).sum()
        run.see(f"loss {step}", loss)
        loss.backward()


of_2_15 = pytest.mark.skipif(
    "param_dtype_override_fn" not in signature(MixedPrecisionPolicy).parameters,
    reason="dtypes of single parameters come with torch 2.15",
)


class Scaled(nn.Module):
    """A matrix, and factors that are to be wider."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.matrix = nn.Linear(16, 16, bias=False)
        self.factors = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.matrix(x) * self.factors
        return y


@of_2_15
@cases((None,), (FP32,), shapes=ON_TWO)
def test_some_parameters_keep_their_dtype(run: Run, reduce: Any) -> None:
    policy: Any = MixedPrecisionPolicy
    narrow = policy(BF16, reduce, param_dtype_override_fn=lambda p: FP32 if p.ndim == 1 else None)
    model = run.set_up(nn.Sequential(Scaled(), Scaled()), mp_policy=narrow)
    train_on(run, model, 4, 16)


@of_2_15
@cases((True,), (False,), shapes=ON_TWO)
def test_gradients_of_one_unit_have_dtypes_of_their_own(run: Run, alike: bool) -> None:
    """FCDP adds micro-batches up in fp32, so gradients are whole numbers, which bf16 holds."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for param in model.parameters():
        param.data.fill_(1)
        if alike or param.ndim == 1:
            param.grad_dtype = BF16
    run.set_up(model, [model])
    for micro in range(3):
        together = fcdp.accumulate(model, last=micro == 2) if run.cached else nullcontext()
        with together:
            model(torch.full((1, 8), 1.0 + run.topology.rank)).sum().backward()
    run.see_gradients(model)
