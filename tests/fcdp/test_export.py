"""Other programs load what the sharded model holds, to the bit."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig

import fcdp
from tests.fcdp.checkpoints import assert_equal
from tests.fcdp.training import (
    Run,
    Settings,
    TinyLM,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    topology_of,
)
from tests.ranks import Pools, on_ranks

ADAPTERS = Settings(2, 2, adapter_rank=3)

GPT2 = GPT2Config(n_embd=12, n_layer=2, n_head=2, vocab_size=31, n_positions=16)
LLAMA = LlamaConfig(
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=31,
    tie_word_embeddings=False,
)
CONFIGS = {"tied_gpt2": GPT2, "untied_llama": LLAMA}
EXPERTS = Qwen3MoeConfig(
    hidden_size=12,
    intermediate_size=20,
    moe_intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    vocab_size=31,
)


def language_model(config: PretrainedConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def with_lora(model: Any) -> Any:
    config = peft.LoraConfig(r=3, target_modules=["c_attn", "q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)  # PEFT's zeros would hide a loss of the adapters
    return model


def export_after_a_forward(config: PretrainedConfig, lora: bool, directory: Path) -> None:
    """The forward leaves some parameters gathered, where export must find the sharded ones."""
    model = language_model(config)
    model = fcdp.shard(with_lora(model) if lora else model, topology_of(2, 2))
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, 8))
    fcdp.export(model, directory / "model")
    if lora:
        fcdp.save_adapters(model, directory / "adapters")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_and_peft_load_what_was_written(
    ranks: Pools, tmp_path: Path, name: str, lora: bool
) -> None:
    original = language_model(CONFIGS[name])
    base = {key: value.clone() for key, value in original.state_dict().items()}
    expected = with_lora(original).state_dict() if lora else {}
    (tmp_path / "model").mkdir()
    # A model in parts, which stood here before: transformers would take it for the new one's.
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("stale")
    ranks.run(4, export_after_a_forward, CONFIGS[name], lora, tmp_path)
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}
    assert [*(tmp_path / "model").glob("*.safetensors")] == [tmp_path / "model/model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal(loaded.state_dict(), base)
    assert loaded.config.architectures == [type(original).__name__]
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (name == "untied_llama")
    if lora:
        adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
        assert adapters
        assert all("lora_" in key for key in adapters)
        loaded = peft.PeftModel.from_pretrained(loaded, str(tmp_path / "adapters"))
        assert_equal(loaded.state_dict(), expected)


@pytest.mark.parametrize("experts", [1, 2])
@on_ranks(4)
def test_a_model_that_transformers_sharded_is_written_as_by_itself(
    tmp_path: Path, experts: int
) -> None:
    """By itself all ranks write it together, and fcdp.export has one write it alone."""
    topology = topology_of(2, 2)
    if dist.get_rank() == 0:
        language_model(EXPERTS).save_pretrained(tmp_path / "loaded")
    dist.barrier()
    distributed = DistributedConfig(fsdp_size=4, ep_size=experts)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "loaded", distributed_config=distributed, dtype=torch.float32
    )
    model = fcdp.cache_parameters(loaded, topology)
    model.save_pretrained(tmp_path / "theirs")
    fcdp.export(model, tmp_path / "ours")
    assert model.config.distributed_config is distributed
    theirs, ours = (
        {path.name: path.read_bytes() for path in (tmp_path / whose).iterdir()}
        for whose in ("theirs", "ours")
    )
    assert ours == theirs


@on_ranks(4)
def test_a_model_of_ones_own_is_written_by_its_names(tmp_path: Path) -> None:
    model = Run(ADAPTERS).model
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5 if param.requires_grad else 1.0)
    fcdp.save_adapters(model, tmp_path)
    fcdp.export(model, tmp_path)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    trainable = [key for key in state if "first" in key or "second" in key]
    assert_equal(adapters, {key: state[key] for key in trainable})
    other = make_model(ADAPTERS)
    assert not other.load_state_dict(adapters, strict=False).unexpected_keys
    other = shard_with_fcdp(other, topology_of(2, 2), ADAPTERS)
    expected, loss = (loss_of(each, next(batches(ADAPTERS, 0))) for each in (model, other))
    assert torch.equal(loss, expected)
    del state["head.weight"]  # tied to the embedding
    assert_equal(load_file(tmp_path / "model.safetensors"), state)


@on_ranks(2)
def test_a_write_that_fails_midway_leaves_the_old_files(tmp_path: Path) -> None:
    """The disk fills up in the middle of a file."""
    run = Run(Settings(2, 1, adapter_rank=3))
    first, writes = run.topology.rank == 0, (fcdp.export, fcdp.save_adapters)
    for write in writes:
        write(run.model, tmp_path)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(tensors: dict[str, torch.Tensor], path: Path, **others: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError("no space left")

    before = files() if first else {}
    with mock.patch("safetensors.torch.save_file", half):
        for write in writes:
            message = "^no space left" if first else "rank 0: no space left"
            with pytest.raises((OSError, RuntimeError), match=message):
                write(run.model, tmp_path)
    if first:
        assert {*before} == {"adapter_model.safetensors", "model.safetensors"}
        assert files() == before


class SavesItself(TinyLM):
    def save_pretrained(self, directory: Path, state_dict: dict[str, torch.Tensor]) -> None:
        type(self).state = state_dict  # it is a plain copy, and ends with the write


@on_ranks(4)
def test_a_model_that_saves_itself_gets_tied_parameters_as_such(tmp_path: Path) -> None:
    """Rank 0 alone passes it what its ``state_dict`` has."""
    torch.manual_seed(0)
    plain = SavesItself(0)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    topology = topology_of(2, 2)
    model: Any = shard_with_fcdp(plain, topology, Settings(2, 2))
    fcdp.export(model, tmp_path)
    assert hasattr(model, "state") == (topology.rank == 0)
    if topology.rank == 0:
        assert_equal(model.state, state)
        assert model.state["head.weight"] is model.state["embedding.weight"]


def with_views(model: Any) -> Any:
    """``model`` with buffers, and parameters that stay whole, that are views of one memory."""
    table = torch.arange(24.0).view(4, 6)
    views = {"table": table, "top": table[:2], "turned": table.t(), "wide": table[0, :1].expand(3)}
    for name, view in views.items():
        model.register_buffer(name, view)
    first = torch.ones(4)
    model.one, model.other = nn.Parameter(first), nn.Parameter(first[1:])
    return model


@pytest.mark.parametrize("name", [None, *CONFIGS])
@on_ranks(2)
def test_views_of_one_memory_are_written_each(name: str | None, tmp_path: Path) -> None:
    """As safetensors refuses them, and transformers does; read again, each is its own."""
    plain = with_views(language_model(CONFIGS[name]) if name else make_model(Settings(2, 1)))
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    model = fcdp.shard(plain, topology_of(2, 1), ignored_params=[plain.one, plain.other])
    fcdp.export(model, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert before.keys() - written.keys() <= {"head.weight", "lm_head.weight"}, "tied ones"
    assert_equal(written, {key: before[key] for key in written})
    assert model.top.data_ptr() == model.table.data_ptr(), "the model has its views still"


@on_ranks(2)
def test_what_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    run, file = Run(Settings(2, 1)), tmp_path / "file"
    model = run.model
    file.write_text("in the way")
    with pytest.raises((RuntimeError, OSError), match="rank 0: " if run.topology.rank else "file"):
        fcdp.export(model, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        for write in (fcdp.export, fcdp.save_adapters):
            with pytest.raises(ImportError, match="pip install safetensors"):
                write(model, file)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter has requires_grad"):
        fcdp.save_adapters(model, file)
