"""Casts of parameters, inputs and outputs: by module, in several dtypes, with odd sub-modules."""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

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
