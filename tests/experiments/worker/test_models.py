"""The models of cells: by their configuration, with pretrained weights, and users' own.

Equal weights, the parameters that LoRA trains, and those that are frozen.
"""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn as nn

from experiments.records.cell import Cell, ClusterSpec
from experiments.records.workload import ConfiguredModel, Origin, OwnModel
from experiments.worker import models
from tests.experiments import families
from tests.experiments.cells import cell, model_spec
from tests.experiments.golden import cases, read
from tests.fcdp.training import topology_of
from tests.ranks import Pools

WHERE = "mine.yaml:5: models[0]"


def of(family: str, folder: Path | None = None, **settings: Any) -> Cell:
    """A cell of a model of the family; of its pretrained weights where there is a folder."""
    spec = ConfiguredModel(
        name="theirs",
        config="./saved",
        weights="random" if folder is None else "pretrained",
        configuration=families.configuration(family) | settings.pop("configuration", {}),
    )
    origin = Origin(folder=str(folder or ""), model=WHERE)
    return cell("fcdp", model=spec, origin=origin, **{"sequence_length": 16, **settings})


def own(function: str, **settings: Any) -> Cell:
    spec = OwnModel(name="mine", function=f"tests.experiments.own_model:{function}")
    return cell("fcdp", model=spec, origin=Origin(model=WHERE), **settings)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(32).view(2, 16), use_cache=False).logits


@pytest.mark.parametrize("kind", ["emulated", "rented"])
def test_a_gpu_draws_the_weights_of_emulated_nodes(
    kind: Literal["emulated", "rented"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cluster = ClusterSpec(kind=kind, nodes=2, ranks_per_node=1)
    gpu = models._drawing_gpu(of("llama", cluster=cluster))
    assert gpu == (torch.device("cuda") if kind == "emulated" else None)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_family_has_its_blocks_and_nothing_random(family: str) -> None:
    model, blocks = models.build(of(family))
    assert model.training
    assert len(blocks) == 3
    names = [name for name, module in model.named_modules() if any(module is b for b in blocks)]
    assert [re.findall(r"\d+$", name) for name in names] == [["0"], ["1"], ["2"]]
    inside = sum(param.numel() for block in blocks for param in block.parameters())
    assert inside > 0.5 * sum(param.numel() for param in model.parameters())
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert models.vocabulary(model) == 256
    torch.testing.assert_close(logits(model), logits(model))
    again, _ = models.build(of(family))
    assert all(
        torch.equal(*pair) for pair in zip(again.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_configuration_of_a_built_in_family_is_the_same_model(family: Any) -> None:
    spec = model_spec(family, layers=3, width=32)
    built_in, _ = models.build(cell("fcdp", model=spec))
    theirs, _ = models.build(of(family, sequence_length=64))
    assert logits(theirs).equal(logits(built_in))


def test_lora_adapts_all_linear_layers_of_the_blocks_of_an_unknown_family() -> None:
    model, blocks = models.build(own("build", tuning="lora"))
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert len(trained) == 4
    assert all(".blocks." in name and ".lora_" in name for name in trained)
    assert len(blocks) == 2
    assert model(torch.arange(6).view(2, 3)).shape == (2, 3, 256)


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_pretrained_weights_are_those_of_the_folder(family: str, tmp_path: Path) -> None:
    saved = families.save(family, tmp_path / "saved")
    loaded, blocks = models.build(of(family, tmp_path))
    assert len(blocks) == 3
    expected = dict(saved.named_parameters())
    assert expected.keys() == dict(loaded.named_parameters()).keys()
    for name, param in loaded.named_parameters():
        assert torch.equal(param, expected[name]), name
    random, _ = models.build(of(family))
    assert not logits(random).equal(logits(loaded))


def problem(invalid: Cell) -> str:
    with pytest.raises(ValueError, match=re.escape(WHERE)) as raised:
        models.build(invalid)
    return str(raised.value).removeprefix(f"{WHERE}.")


def test_weights_that_are_not_there_name_the_key(tmp_path: Path) -> None:
    """All, those of some layers, or all but pickled ones, which are not opened."""
    folder = tmp_path / "saved"
    assert problem(of("qwen2", tmp_path)) == (
        f"weights: there is no {folder} on this node; each node needs it, at the same path"
    )
    saved = families.save("qwen2", folder)
    error = problem(of("qwen2", tmp_path, configuration={"num_hidden_layers": 4}))
    assert error.startswith("weights: ./saved has no weights for ")
    assert "layers.3." in error
    (folder / "model.safetensors").unlink()
    torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    error = problem(of("qwen2", tmp_path))
    assert error.startswith("weights: no pretrained weights of ./saved on ")


#: Configurations and functions of which no model comes, and what the error has.
UNTRAINABLE = cases(Path(__file__).with_name("untrainable.txt"))


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_what_makes_no_model_names_the_key(case: str) -> None:
    key, value = read(case)
    error = problem(own(value) if key == "function" else of("qwen2", configuration=value))
    begins, *parts = UNTRAINABLE[case]
    assert error.startswith(f"{key}: {begins}")
    assert [part for part in parts if part not in error] == []
    assert len(error.splitlines()) == 1
    assert len(error) < 600


def test_a_decoder_of_a_masked_family_is_causal_and_a_key_may_be_of_a_loss() -> None:
    assert models.build(of("qwen2", configuration={"model_type": "bert", "is_decoder": True}))
    with pytest.raises(ValueError, match=r"^mine.yaml:9: workload.loss: nowhere:loss cannot be "):
        models.find_function("nowhere:loss", "mine.yaml:9: workload.loss")


#: Per family and block: the projections that get adapters, with their inputs and outputs.
PROJECTIONS = {
    # GPT-2 projects to Q, K and V at once.
    "gpt2": {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32)},
    "llama": {f"self_attn.{name}_proj": (32, 32) for name in "qkvo"},
    # The matrices that peft adapts.
    "qwen2": {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16)},
}


@pytest.mark.parametrize("family", PROJECTIONS)
def test_lora_trains_low_rank_factors_of_what_is_usual_of_the_family(family: str) -> None:
    model, blocks = models.build(of(family, tuning="lora", lora_rank=2))
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
    """The check's error on this rank, for weights that differ or do not."""
    topology = topology_of(2, 1)
    torch.manual_seed(topology.rank if differ else 0)
    model = {"model": OwnModel(name="mine", function="mine:build")} if of_a_user else {}
    checked = cell("fcdp", origin=Origin(model="mine.yaml:5: models[0]"), **model)
    try:
        models.check(nn.Linear(3, 3), checked, topology)
    except ValueError as error:
        return str(error)
    return None


def test_unequal_weights_of_a_user_are_an_error_on_all_ranks_and_no_others(ranks: Pools) -> None:
    message, other = ranks.run(2, compared, True, True)
    assert message == other
    assert message.startswith(
        "mine.yaml:5: models[0].function: mine:build makes other weights on rank 1 than on rank 0"
    )
    for of_a_user, differ in ((True, False), (False, True)):
        assert ranks.run(2, compared, of_a_user, differ) == [None, None]
