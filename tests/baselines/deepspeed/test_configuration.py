"""DeepSpeed's configuration: on a small model what its defaults are on one of 30B."""

import importlib
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines import optimizers
from experiments.worker import models
from tests.baselines.jobs import alone, job
from tests.experiments.cells import cell, model_spec

Family = Literal["gpt2", "llama"]

shapes = st.tuples(
    st.sampled_from(["gpt2", "llama"]),
    st.integers(1, 6),  # layers
    st.sampled_from([8, 32, 48, 64, 128, 256, 1024]),  # width
    st.sampled_from([None, 1, 8, 64]),  # LoRA's rank
)


@lru_cache(maxsize=64)
def build(
    family: Family, layers: int, width: int, lora_rank: int | None = None
) -> tuple[nn.Module, list[nn.Module]]:
    """A model without memory: sizes are all that matters here."""
    tuning = {} if lora_rank is None else {"tuning": "lora", "lora_rank": lora_rank}
    spec = model_spec(family, layers=layers, width=width, heads=1)
    with torch.device("meta"):
        model, blocks = models.build(cell("deepspeed-zero3", model=spec, **tuning))
    return model, list(blocks)


def strategy() -> Any:
    """The module under test, imported when a test first needs it: DeepSpeed takes seconds."""
    return importlib.import_module("baselines.deepspeed.configuration")


def configured(model: nn.Module, blocks: list[nn.Module], **own: Any) -> dict[str, Any]:
    return strategy().configuration(model, job(alone(), blocks, **own))


@lru_cache
def defaults() -> Any:
    """Defaults of DeepSpeed, which the rules of the configuration refer to."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig(stage=3)


def count(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def test_batch_dtype_and_optimizer_are_the_jobs() -> None:
    """Optimizers other than Adam alone are let through untested."""
    shape, untested = build("gpt2", 2, 32), "zero_allow_untested_optimizer"
    sgd = {"dtype": torch.bfloat16, "accumulation": 4, "optimizer": optimizers.SGD(kind="sgd")}
    names = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", untested
    usual, other = (configured(*shape, **own) for own in ({}, sgd))
    assert [usual.get(name) for name in names] == [2, 1, {"enabled": False}, None]
    assert [other[name] for name in names] == [2, 4, {"enabled": True}, True]


@given(shapes)
@settings(max_examples=40)
def test_the_rules_hold_for_every_model(shape: tuple[Family, int, int, int | None]) -> None:
    model, blocks = build(*shape)
    zero = configured(model, blocks)["zero_optimization"]
    assert zero["stage"] == 3
    # Two blocks may be whole at a time, and gradients are reduced a block at a time.
    block = max(map(count, blocks))
    assert zero["stage3_max_live_parameters"] == 2 * block
    assert zero["reduce_bucket_size"] == block
    # DeepSpeed keeps parameters of at most that many elements: no matrix whole on every rank, but
    # vectors and factors, unless a matrix is smaller.
    threshold = zero["stage3_param_persistence_threshold"]
    matrices, small = set[int](), set[int]()
    for name, param in model.named_parameters():
        (small if param.dim() == 1 or "lora_" in name else matrices).add(param.numel())
    assert min(matrices) > threshold
    assert max(small) <= threshold or max(small) >= min(matrices)
    # Shares of the model as of 30B, but never nothing: 0 would mean something else.
    total = count(model)
    for setting in ("max_reuse_distance", "prefetch_bucket_size"):
        share = zero[f"stage3_{setting}"]
        assert share >= 1
        assert abs(share - total * getattr(defaults(), setting) / 30e9) <= 1


def test_a_model_of_30b_gets_nearly_the_defaults() -> None:
    model, blocks = build("gpt2", 48, 7168)
    assert count(model) == pytest.approx(30e9, rel=0.02)
    zero = configured(model, blocks)["zero_optimization"]
    for setting, near in (
        ("stage3_max_reuse_distance", 0.02),
        ("stage3_prefetch_bucket_size", 0.02),
        ("stage3_max_live_parameters", 0.25),
        ("reduce_bucket_size", 0.25),
    ):
        usual = getattr(defaults(), setting.removeprefix("stage3_"))
        assert zero[setting] == pytest.approx(usual, rel=near)
    # The same parameters stay whole as with the default.
    usual = defaults().param_persistence_threshold
    for setting in (zero["stage3_param_persistence_threshold"], usual):
        whole = [param for param in model.parameters() if param.numel() <= setting]
        assert {param.dim() for param in whole} == {1}
        assert len(whole) == sum(param.dim() == 1 for param in model.parameters())
