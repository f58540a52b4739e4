"""The models of cells: equal weights, what LoRA trains, what is frozen."""

from typing import Any, Literal

import pytest
import torch
import torch.nn as nn

from experiments.records.workload import Origin, OwnModel
from experiments.worker import models
from tests.experiments.cells import cell, model_spec
from tests.fcdp.training import topology_of
from tests.ranks import Pools

#: Per family and block: the projections that get adapters, with their inputs and outputs.
PROJECTIONS = {
    # GPT-2 projects to Q, K and V at once.
    "gpt2": {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32)},
    "llama": {f"self_attn.{name}_proj": (32, 32) for name in "qkvo"},
}


def build(family: Literal["gpt2", "llama"], **settings: Any) -> tuple[nn.Module, list[nn.Module]]:
    spec = model_spec(family, layers=3, width=32)
    model, blocks = models.build(cell("fcdp", model=spec, sequence_length=16, **settings))
    return model, list(blocks)


def test_what_is_frozen_is_held_in_its_type_and_adapters_in_float32() -> None:
    wide = build("llama", tuning="lora", dtype="bfloat16")[0]
    model = build("llama", tuning="lora", dtype="bfloat16", frozen_dtype="bfloat16")[0]
    for param, expected in zip(model.parameters(), wide.parameters(), strict=True):
        dtype = torch.float32 if param.requires_grad else torch.bfloat16
        assert torch.equal(param, expected.to(dtype))
        assert param.dtype == dtype


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_frozen_parameters_of_a_users_own_model_stay_as_it_has_them_unless_they_are_narrowed(
    held: str,
) -> None:
    """Codes of a quantised base are whole numbers: no cast keeps them."""
    own = OwnModel(name="mine", function="tests.experiments.own_model:partly_narrow")
    of = {"model": own, "tuning": "lora", "dtype": "bfloat16", "frozen_dtype": held}
    model, _ = models.build(cell("fcdp", **of))
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    prefix = "base_model.model."
    assert dtypes.pop(f"{prefix}codes") == torch.int8
    assert dtypes.pop(f"{prefix}embedding.weight") == torch.bfloat16
    adapters = {name for name in dtypes if "lora_" in name}
    assert {dtypes.pop(name) for name in adapters} == {torch.float32}
    assert {*dtypes.values()} == {getattr(torch, held)}


@pytest.mark.parametrize("given", [{"tuning": "full", "dtype": "bfloat16"}, {"tuning": "lora"}])
def test_a_frozen_type_needs_something_frozen_that_is_gathered_in_it(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bfloat16 is for tuning lora, .* with dtype bfloat16"):
        cell("fcdp", frozen_dtype="bfloat16", **given)


@pytest.mark.parametrize("family", PROJECTIONS)
def test_lora_trains_low_rank_factors_of_query_key_value_and_output(
    family: Literal["gpt2", "llama"],
) -> None:
    model, blocks = build(family, tuning="lora", lora_rank=2)
    for block in blocks:
        trained = {
            name: tuple(param.shape)
            for name, param in block.named_parameters()
            if param.requires_grad
        }
        assert trained == {
            f"{projection}.lora_{factor}.default.weight": shape
            for projection, (inputs, outputs) in PROJECTIONS[family].items()
            for factor, shape in (("A", (2, inputs)), ("B", (outputs, 2)))
        }
    in_blocks = {id(param) for block in blocks for param in block.parameters()}
    for name, param in model.named_parameters():
        assert param.requires_grad == ("lora_" in name)
        assert not param.requires_grad or id(param) in in_blocks


def compared(of_a_user: bool, differ: bool) -> str | None:
    """What the check says on this rank of weights that differ, or do not."""
    topology = topology_of(2, 1)
    torch.manual_seed(topology.rank if differ else 0)
    own = {"model": OwnModel(name="mine", function="mine:build")} if of_a_user else {}
    wanted = cell("fcdp", origin=Origin(model="mine.yaml:5: models[0]"), **own)
    try:
        models.check(nn.Linear(3, 3), wanted, topology)
    except ValueError as error:
        return str(error)
    return None


def test_unequal_weights_of_a_user_are_an_error_on_all_ranks_and_no_others(ranks: Pools) -> None:
    said, same = ranks.run(2, compared, True, True)
    assert said == same
    assert said.startswith(
        "mine.yaml:5: models[0].function: mine:build makes other weights on rank 1 than on rank 0"
    )
    for of_a_user, differ in ((True, False), (False, True)):
        assert ranks.run(2, compared, of_a_user, differ) == [None, None]
