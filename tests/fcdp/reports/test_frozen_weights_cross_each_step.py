"""Of a model that peft adapts, only what is trained crosses nodes after the first step.

Whoever calls it or nobody: lists and dictionaries of parameters, trained biases of frozen layers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.test_peft import loss_of, optimizer_of, small_llama
from tests.fcdp.training import take_step, topology_of
from tests.ranks import on_ranks
from tests.tiers import in_ci

T = ["q_proj", "v_proj"]
METHODS: dict[str, Callable[[Any], Any]] = {
    "ia3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda peft: peft.LoHaConfig(r=2, target_modules=T),
    "lokr": lambda peft: peft.LoKrConfig(r=2, target_modules=T),
    "vera": lambda peft: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    "fourierft": lambda peft: peft.FourierFTConfig(n_frequency=8, target_modules=T),
    "target_parameters": lambda peft: peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["q_proj.weight"]
    ),
    "biases": lambda peft: peft.LoraConfig(r=2, target_modules=T, bias="all"),
    "modules_to_save": lambda peft: peft.LoraConfig(
        r=2, target_modules=T, modules_to_save=["lm_head"]
    ),
    "tokens": lambda peft: peft.LoraConfig(r=2, target_modules=T, trainable_token_indices=[1]),
    "oft": lambda peft: peft.OFTConfig(r=0, oft_block_size=4, target_modules=T),
    "boft": lambda peft: peft.BOFTConfig(boft_block_size=4, target_modules=T),
    "hra": lambda peft: peft.HRAConfig(r=2, target_modules=T),
    "norms": lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "randlora": lambda peft: peft.RandLoraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    "miss": lambda peft: peft.MissConfig(r=4, target_modules=T),
    "c3a": lambda peft: peft.C3AConfig(block_size=8, target_modules=T),
    "shira": lambda peft: peft.ShiraConfig(r=2, target_modules=T),
    "road": lambda peft: peft.RoadConfig(group_size=8, target_modules=T),
    "waveft": lambda peft: peft.WaveFTConfig(n_frequency=8, target_modules=T),
    "prompt": lambda peft: peft.PromptTuningConfig(num_virtual_tokens=4),
    "ptuning": lambda peft: peft.PromptEncoderConfig(num_virtual_tokens=4),
}
IN_CI = [*METHODS][7:]


def make_model(method: str) -> tuple[Any, list[Any]]:
    import peft

    model = small_llama(attention_bias=method == "biases")
    blocks = list(model.model.layers)
    config = METHODS[method](peft)
    config.task_type = "CAUSAL_LM"
    return peft.get_peft_model(model, config), blocks


def trained(how: str, method: str) -> tuple[list[float], list[int], int]:
    """Losses of three steps, bytes of each step's gathers between nodes, and those of adapters."""
    topology, (model, blocks) = topology_of(2, 1), make_model(method)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fcdp")
        if how == "fsdp2":
            for module in [*blocks, model]:
                fully_shard(module, mesh=topology.mesh)
        else:
            fcdp.shard(
                model, topology, units=blocks, cache=fcdp.CacheOptions(detect_writes=how == "shard")
            )
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(topology.rank)
    losses, sent = [], []
    for _ in range(3):
        tokens = torch.randint(64, (2, 9), generator=generator)
        losses.append(take_step(loss_of(model, tokens), optimizer))
        if how != "fsdp2":
            counts = fcdp.ledger(model).snapshot()["inter_node"]
            sent.append(counts["forward"] + counts.get("backward", 0))
            fcdp.ledger(model).reset()
    units = engine_of(model).units if how != "fsdp2" else []
    return losses, sent, sum(unit.shard_bytes for unit in units if unit.trainable)


@pytest.mark.parametrize(
    "method", [in_ci(method) if method in IN_CI else method for method in METHODS]
)
@on_ranks(2)
def test_only_adapters_cross_after_the_first_step(method: str) -> None:
    expected, *_ = trained("fsdp2", method)
    assert len(set(expected)) == 3
    for how in ("shard", "undetected"):
        losses, sent, adapters = trained(how, method)
        assert losses == expected, how
        assert sent[1:] == [adapters] * 2, how
        assert sent[0] > 5 * adapters
