"""The README: its tables are those of the records, and its code runs."""

import re
from typing import Any

import torch

import fcdp
from fcdp.engine import engine_of
from scripts import readme
from tests.examples.launch import launched
from tests.programs import ROOT
from tests.ranks import Pools

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_records() -> None:
    """Tables of the README, and of the pages that have some."""
    assert readme.main(["--check"]) == 0


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return str(block)


def run_example() -> dict[str, Any]:
    """The README's example word by word, on a small Llama: a step, and one more of the same."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    scope: dict[str, Any] = {
        "fcdp": fcdp,
        "torch": torch,
        "get_peft_model": peft.get_peft_model,
        "LoraConfig": peft.LoraConfig,
        "model": LlamaForCausalLM(config),
        "is_last": True,
        "batch": torch.arange(18).view(2, 9) + torch.distributed.get_rank(),
        "loss": lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False).loss,
    }
    with launched(ranks_per_node=1):
        exec(compile(example(), "README.md", "exec", dont_inherit=True), scope)
    model, optimizer, batch = scope["model"], scope["optimizer"], scope["batch"]
    before = scope["loss"](model, batch).item()
    optimizer.step()
    optimizer.zero_grad()
    fcdp.ledger(model).reset()
    after = scope["loss"](model, batch)
    after.backward()
    adapters = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
    return {
        "units": [unit.name for unit in engine_of(model).units if not unit.trainable],
        "learns": before - after.item(),
        "crossed": fcdp.ledger(model).total("inter_node"),
        "adapters": adapters,
    }


def test_the_example_trains_adapters_and_sends_them_alone(ranks: Pools) -> None:
    for ran in ranks.run(2, run_example):
        layers = [f"base_model.model.model.layers.{index}" for index in range(3)]
        assert ran["units"] == ["root", *layers]
        assert ran["learns"] > 0
        # Half of the adapters goes out and half of their gradients, to the other one of two nodes.
        assert ran["crossed"] == ran["adapters"]
