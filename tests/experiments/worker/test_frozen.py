"""Types of the frozen parameters of cells, by layer and by bytes."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.records.allowed import PACKED
from experiments.records.cell import Cell, ClusterSpec, FrozenDType
from experiments.records.workload import Origin, OwnModel
from experiments.worker import frozen, models
from experiments.worker.worker import _Training
from fcdp.extensions import held_bytes
from tests.experiments.cells import cell, model_spec
from tests.fcdp.training import topology_of
from tests.ranks import Pools

#: Bytes of a block's weights that FSDP2 shards, per weight, at least and at most. By torchao a
#: scale of a byte goes with 64 weights, and one in float32 with some of these.
SHARDED = {"float8": (2.0, 2.0), "nf4": (0.5 + 1 / 64, 0.6), "bnb-4bit": (0.5, 0.5)}


def cell_of(kind: FrozenDType, family: Any = "llama", nodes: int = 2) -> Cell:
    spec = model_spec(family, layers=3, width=32, heads=2)
    own: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "frozen_dtype": kind}
    cluster = ClusterSpec(kind="emulated", nodes=nodes, ranks_per_node=1)
    return cell("fcdp", model=spec, sequence_length=16, cluster=cluster, **own)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_frozen_parameters_of_a_users_own_model_stay_as_it_has_them_unless_they_are_narrowed(
    held: str,
) -> None:
    """Codes of a quantised base are whole numbers: no cast keeps them."""
    spec = OwnModel(name="mine", function="tests.experiments.own_model:partly_narrow")
    own: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "frozen_dtype": held}
    model, _ = models.build(cell("fcdp", model=spec, origin=Origin(model="mine.yaml:5"), **own))
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    prefix = "base_model.model."
    assert dtypes.pop(f"{prefix}codes") == torch.int8
    assert dtypes.pop(f"{prefix}embedding.weight") == torch.bfloat16
    adapters = {name for name in dtypes if "lora_" in name}
    assert {dtypes.pop(name) for name in adapters} == {torch.float32}
    assert {*dtypes.values()} == {getattr(torch, held)}


@pytest.mark.parametrize("kind", PACKED)
def test_linear_layers_of_a_packed_base_take_its_bytes_and_all_else_bfloat16(
    kind: FrozenDType,
) -> None:
    pytest.importorskip(PACKED[kind], reason="the group quantised has it")
    plain, (model, blocks) = models.build(cell_of("bfloat16"))[0], models.build(cell_of(kind))
    layers = {
        module.weight
        for block in blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name
    }
    assert len(layers) == 3 * 7
    least, most = SHARDED[kind]
    for weight in layers:
        assert least <= held_bytes(weight) / frozen.weights(weight) <= most
    others = {param.dtype for param in model.parameters() if not param.requires_grad} - {
        weight.dtype for weight in layers
    }
    assert others <= {torch.bfloat16}
    count = sum(param.numel() for param in plain.parameters())
    assert sum(map(frozen.weights, model.parameters())) == count


@pytest.mark.parametrize("kind", PACKED)
def test_what_cannot_be_packed_is_named(kind: FrozenDType) -> None:
    pytest.importorskip(PACKED[kind], reason="the group quantised has it")
    with pytest.raises(ValueError, match=f"'{kind}': is for models whose blocks have linear lay"):
        models.build(cell_of(kind, "gpt2"))
    if kind != "bnb-4bit":  # whose bytes FSDP2 pads
        with pytest.raises(ValueError, match=rf"'{kind}': does not fit a weight of shape \(32"):
            models.build(cell_of(kind, nodes=3))


def all_reduces_of_a_forward() -> list[tuple[int, float]]:
    """All-reduces in a worker's forward, and its loss, without scales kept and with them."""
    cell, topology = cell_of("float8"), topology_of(2, 1)
    found = []
    for kept in (False, True):
        keep = frozen.keep_scales if kept else lambda model: None
        with mock.patch.object(frozen, "keep_scales", keep):
            model = _Training(cell, topology, Path()).model
        with torch.no_grad(), torch.profiler.profile() as profile:
            output = model(input_ids=torch.arange(16)[None]).logits
        calls = [each for each in profile.events() if each.name == "gloo:all_reduce"]
        found.append((len(calls), output.float().sum().item()))
    dist.barrier()
    return found


def test_a_worker_has_scales_of_frozen_weights_reduced_once(ranks: Pools) -> None:
    pytest.importorskip("torchao", reason="the group quantised has it")
    (each, expected), (none, actual) = ranks.run(2, all_reduces_of_a_forward)[0]
    assert each == 3 * 7
    assert none == 0
    assert actual == expected
