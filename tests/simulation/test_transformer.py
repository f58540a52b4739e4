"""Operations of a token's training; adapters and widths that no model has."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.transformer import Lora, ModelSpec, Transformer
from simulation.workload import Workload, block_work, token_work
from tests.experiments.cells import model_spec

SIZE = st.integers(1, 100)


@given(st.sampled_from(["gpt2", "llama"]), SIZE, SIZE, st.integers(1, 8), st.integers(1, 4096))
def test_training_takes_three_times_the_forward(
    family: Literal["gpt2", "llama"], layers: int, heads: int, head: int, length: int
) -> None:
    spec = ModelSpec(name="m", family=family, layers=layers, width=8 * heads * head, heads=heads)
    model = Transformer.of(spec, length)
    given_work = Workload(strategy="fsdp2", model=model, sequence_length=length, micro_batch=1)
    blocks = layers * block_work(given_work)[0].flops
    flops = token_work(given_work).flops
    assert flops == pytest.approx(3 * (blocks + model.head_flops))
    again = token_work(replace(given_work, recomputed=1.0)).flops
    assert again == pytest.approx(flops + blocks)
    # 6N counts biases, norms and positions too, which are no matrix products.
    assert flops <= naive_flops(model, length) * (1 + 1e-9)


def naive_flops(model: Transformer, sequence_length: int) -> float:
    """Operations of one token as most trainers count, 6N + 12·L·H·Q·T, frozen weights included.

    N leaves out embeddings that only look up.
    """
    lookup = model.positions + (0 if model.tied else model.vocabulary)
    counted = model.parameters - lookup * model.width
    return 6.0 * counted + 12.0 * model.layers * model.width * sequence_length


def test_an_unknown_target_of_adapters_and_a_width_that_heads_do_not_divide_are_errors() -> None:
    model = Transformer.of(model_spec("gpt2", layers=3, width=32), 16)
    with pytest.raises(ValueError, match=r"'c_attn': allowed are attn\.c_attn, attn\.c_proj"):
        model.adapter_parameters(Lora(2, ("c_attn",)))
    with pytest.raises(ValueError, match="width = 30: must be a multiple of heads = 4"):
        replace(model, width=30)
