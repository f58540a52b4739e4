"""The closed forms of a model against its real modules."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.records.modelled import workload_of
from experiments.worker import models
from simulation.transformer import Lora, ModelSpec, Transformer
from simulation.workload import Workload, block_work, token_work
from tests.experiments.cells import cell, model_spec

Family = Literal["gpt2", "llama"]
FAMILIES: list[Family] = ["gpt2", "llama"]
LENGTH = 16
SIZE = st.integers(1, 100)


def transformer(family: Family) -> Transformer:
    return Transformer.of(model_spec(family, layers=3, width=32), LENGTH)


def trained(model: Transformer, length: int, lora: Lora | None = None) -> Workload:
    return Workload(strategy="fsdp2", model=model, lora=lora, sequence_length=length, micro_batch=1)


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_modules(family: Family, tuning: str) -> None:
    spec = model_spec(family, layers=3, width=32)
    given_cell = cell("fcdp", model=spec, sequence_length=LENGTH, tuning=tuning, lora_rank=2)
    real, blocks = models.build(given_cell)
    counted = workload_of(given_cell)
    assert counted.parameters == sum(param.numel() for param in real.parameters())
    assert counted.trained == sum(p.numel() for p in real.parameters() if p.requires_grad)
    block = counted.model.block_parameters + counted.block_adapters
    assert block == sum(param.numel() for param in blocks[0].parameters())


@given(st.sampled_from(FAMILIES), SIZE, SIZE, st.integers(1, 8), st.integers(1, 4096))
def test_training_takes_three_times_the_forward(
    family: Family, layers: int, heads: int, head: int, length: int
) -> None:
    spec = ModelSpec(name="m", family=family, layers=layers, width=8 * heads * head, heads=heads)
    model = Transformer.of(spec, length)
    given_work = trained(model, length)
    blocks = layers * block_work(given_work)[0].flops
    flops = token_work(given_work).flops
    assert flops == pytest.approx(3 * (blocks + model.head_flops))
    again = token_work(replace(given_work, recomputed=1.0)).flops
    assert again == pytest.approx(flops + blocks)
    # 6N counts biases, norms and positions too, which are no matrix products.
    assert flops <= naive_flops(model, length) * (1 + 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights_take_four_operations_and_adapters_six(family: Family) -> None:
    model = transformer(family)
    lora = model.lora(2)
    frozen = model.layers * sum(matrix.weights for matrix in model.matrices)
    frozen += model.vocabulary * model.width  # the output layer
    adapters = model.layers * model.adapter_parameters(lora)
    attention = 12 * model.layers * model.width * LENGTH
    counted = token_work(trained(model, LENGTH, lora)).flops
    assert counted == 4 * frozen + 6 * adapters + attention
    assert counted < naive_flops(model, LENGTH)


def naive_flops(model: Transformer, sequence_length: int) -> float:
    """Operations of one token as most trainers count, 6N + 12·L·H·Q·T, frozen weights included.

    N leaves out embeddings that only look up.
    """
    lookup = model.positions + (0 if model.tied else model.vocabulary)
    counted = model.parameters - lookup * model.width
    return 6.0 * counted + 12.0 * model.layers * model.width * sequence_length


def test_an_unknown_target_of_adapters_and_a_width_that_heads_do_not_divide_are_errors() -> None:
    model = transformer("gpt2")
    with pytest.raises(ValueError, match=r"'c_attn': allowed are attn\.c_attn, attn\.c_proj"):
        model.adapter_parameters(Lora(2, ("c_attn",)))
    with pytest.raises(ValueError, match="width = 30: must be a multiple of heads = 4"):
        replace(model, width=30)
