"""DeepSpeed's configuration: on a small model what its defaults are on one of 30B."""

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines import optimizers
from baselines.strategy import numel
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


def configured(model: nn.Module, blocks: list[nn.Module], **own: Any) -> dict[str, Any]:
    # Imported when a test first needs it: DeepSpeed takes seconds.
    from baselines.deepspeed.configuration import configuration

    return configuration(model, job(alone(), blocks, **own))


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
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    defaults = DeepSpeedZeroConfig(stage=3)
    model, blocks = build(*shape)
    zero = configured(model, blocks)["zero_optimization"]
    assert zero["stage"] == 3
    # Two blocks may be whole at a time, and gradients are reduced a block at a time.
    block = max(numel(each.parameters()) for each in blocks)
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
    total = numel(model.parameters())
    for setting in ("max_reuse_distance", "prefetch_bucket_size"):
        share = zero[f"stage3_{setting}"]
        assert share >= 1
        assert abs(share - total * getattr(defaults, setting) / 30e9) <= 1
