"""Weights of a Hugging Face folder, read by each rank for itself: what from_pretrained gives."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

import fcdp
from tests.fcdp.checkpoints import errors_of
from tests.fcdp.training import topology_of
from tests.ranks import Pools

#: Sizes of which some divide by four ranks, and others do not.
LLAMA = LlamaConfig(
    vocab_size=129,
    hidden_size=24,
    intermediate_size=50,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
CONFIGS = {
    "llama": LLAMA,
    "tied": LlamaConfig(**{**LLAMA.to_diff_dict(), "tie_word_embeddings": True}),
    "gpt2": GPT2Config(vocab_size=129, n_embd=24, n_layer=2, n_head=2, n_positions=32),
}


def write(config: Any, folder: Path, *, body: bool = False, **options: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    (model.base_model if body else model).save_pretrained(folder, **options)


def empty(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


def assert_read(model: nn.Module, expected: nn.Module) -> None:
    """This rank's shards and buffers are those of a model that holds all, to the bit."""
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_read_what_from_pretrained_does(
    ranks: Pools, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    write(CONFIGS[name], tmp_path, body=name == "gpt2", max_shard_size="20KB")
    ranks.run(4, compare, tmp_path, dtype)


def compare(folder: Path, dtype: torch.dtype) -> None:
    topology = topology_of(2, 2)
    model = fcdp.shard(empty(folder, dtype), topology)
    fcdp.load_pretrained(model, folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert_read(model, expected)
    optimizer, rows = torch.optim.SGD(model.parameters()), torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(rows).logits, expected(rows).logits)
        saving = fcdp.save(model, optimizer, folder / "saved", asynchronous=True)
        fcdp.load_pretrained(model, folder)  # again, with all in the cache
        assert saving.done()
        assert torch.equal(model(rows).logits, expected(rows).logits)


def test_adapters_stay_as_they_are_over_a_base_that_is_read(ranks: Pools, tmp_path: Path) -> None:
    write(LLAMA, tmp_path)
    ranks.run(2, compare_adapters, tmp_path)


def compare_adapters(folder: Path) -> None:
    torch.manual_seed(0)  # the same adapters on all ranks
    topology, lora = topology_of(2, 1), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(empty(folder), lora)  # on meta, as their layers are
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", True)
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert {param.any().item() for param in adapters.values()} == {True, False}
    expected = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    expected.load_state_dict(adapters, strict=False)
    fcdp.shard(model, topology)
    fcdp.load_pretrained(model, folder)
    assert_read(model, expected)


def peak(folder: Path) -> tuple[int, bool]:
    """Bytes that this rank's resident memory grew by at most, and whether it read the model."""
    topology = topology_of(2, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    model = fcdp.shard(empty(folder), topology, policy="none")
    fcdp.load_pretrained(model, folder)
    grown = status("VmHWM") - before
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    same = all(
        torch.equal(param.full_tensor(), expected[name])  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    )
    return grown, same


def status(name: str) -> int:
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


def test_a_node_never_holds_more_than_the_model_once(ranks: Pools, tmp_path: Path) -> None:
    """Pages of files count, for each rank that has mapped them."""
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=3,
        num_attention_heads=8,
    )
    write(config, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size > 190e6
    grown, same = zip(*ranks.run(4, peak, tmp_path), strict=True)
    assert all(same)
    assert max(sum(grown[:2]), sum(grown[2:])) <= 1.1 * size


def test_a_rank_without_memory_for_its_shards_stops_all(ranks: Pools, tmp_path: Path) -> None:
    write(LLAMA, tmp_path)
    ranks.run(2, read_without_memory, tmp_path)


def read_without_memory(folder: Path) -> None:
    topology = topology_of(2, 1)
    model = fcdp.shard(empty(folder), topology)
    own = topology.rank == 1
    with pytest.MonkeyPatch.context() as patch:
        if own:
            patch.setattr(torch, "empty_like", mock.Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError if own else RuntimeError, match="no room"):
            fcdp.load_pretrained(model, folder)
    fcdp.load_pretrained(model, folder)
    assert_read(model, AutoModelForCausalLM.from_pretrained(folder))


def test_what_cannot_be_read_is_refused_before_anything_is_changed(
    ranks: Pools, tmp_path: Path
) -> None:
    write(LLAMA, tmp_path)
    ranks.run(2, refuse, tmp_path)


def refuse(folder: Path) -> None:
    topology = topology_of(2, 1)
    wider = LlamaConfig(**{**LLAMA.to_diff_dict(), "vocab_size": 130})
    deeper = LlamaConfig(**{**LLAMA.to_diff_dict(), "num_hidden_layers": 3})
    for config, problem in (
        (wider, r"model.embed_tokens.weight: has shape (129, 24) in the files; must be (130, 24)"),
        (deeper, "lacks model.layers.2.self_attn.q_proj.weight; must have the model's own names"),
    ):
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        fcdp.shard(model, topology)
        assert problem in errors_of(fcdp.load_pretrained, model, folder)
        assert all(param.is_meta for param in model.parameters())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LLAMA)
    fcdp.shard(model, topology)
    refusal = errors_of(fcdp.load_pretrained, model, folder)
    assert "model.rotary_emb.inv_freq: has no memory, and no file has its values" in refusal
    refusal = errors_of(fcdp.load_pretrained, model, folder.parent)
    assert refusal.endswith("has no *.safetensors, as save_pretrained writes")
