"""Models, tokenizers and texts of a few kilobytes, made here: there is no hub to ask."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fcdp

WORDS = [f"w{index}" for index in range(120)]


def tokenizer() -> Any:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    model = WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    plain = Tokenizer(model)
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(layers: int = 2, hidden: int = 64, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def saved(folder: str) -> str:
    """The folder of a model in the hub's form, from which TRL makes its reference models."""
    folders = [f"{folder}/model"]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        llama().save_pretrained(folders[0])
    dist.barrier()
    return folders[0]


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def alone(topology: fcdp.Topology) -> dict[str, Any]:
    """Train LoRA for three steps by ``fcdp.shard`` without a client; return its bytes."""
    model: Any = get_peft_model(llama(), lora())
    fcdp.shard(model, topology)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    rows = torch.randint(3, 128, (2, 16))
    for _ in range(3):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"ledger": fcdp.ledger(model).snapshot()}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


def beside(
    theirs: dict[str, torch.Tensor], expected: Any, model: nn.Module, history: Any
) -> dict[str, Any]:
    """How far FCDP's model is from FSDP2's parameters and history, and what crossed nodes."""
    ledger, ours = fcdp.ledger(model), parameters(model)
    assert ours.keys() == theirs.keys()
    return {
        "history": history,
        "theirs": expected,
        "same_history": history == expected,
        "apart": max((ours[name] - each).abs().max().item() for name, each in theirs.items()),
        "ledger": ledger.snapshot(),
        "hits": ledger.hits,
        "misses": ledger.misses,
    }


def _text(start: int, length: int) -> str:
    return " ".join(WORDS[(start * 7 + index * 3) % len(WORDS)] for index in range(length))


def texts(count: int = 64) -> Dataset:
    return Dataset.from_dict({"text": [_text(index, 12) for index in range(count)]})


def pairs(count: int = 64) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [_text(index, 4) for index in range(count)],
            "chosen": [" " + _text(index + 1, 6) for index in range(count)],
            "rejected": [" " + _text(index + 2, 6) for index in range(count)],
        }
    )


def prompts(count: int = 64) -> Dataset:
    return Dataset.from_dict({"prompt": [_text(index, 4) for index in range(count)]})
