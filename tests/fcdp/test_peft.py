"""What peft and users freeze, add and unfreeze trains like FSDP2 (paper: FCDP-Comm)."""

from __future__ import annotations

import io
import logging
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import take_step, topology_of
from tests.ranks import Pools

STEPS = 4


def make_model(kind: str) -> tuple[nn.Module, list[nn.Module]]:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    blocks = list(model.model.layers)
    if kind in ("lora", "dora", "large_lora", "mixed_dtypes"):
        if kind == "mixed_dtypes":
            model.to(torch.bfloat16)
        rank = 16 if kind == "large_lora" else 2
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            use_dora=kind == "dora",
        )
        model = peft.get_peft_model(model, config)  # adapters of a bf16 base are fp32
    elif kind == "prefix":
        model = peft.get_peft_model(
            model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        )
    elif kind == "head":
        for name, param in model.named_parameters():
            param.requires_grad_("lm_head" in name)
    return model, blocks


def losses_of(kind: str, engine: str, ranks_per_node: int) -> tuple[list[float], list[str]]:
    """Losses of four steps, and the units that were gathered across nodes in the last."""
    topology = topology_of(2, ranks_per_node)
    model, blocks = make_model(kind)
    if engine == "fcdp":
        fcdp.shard(model, topology, units=blocks)
    else:
        # FSDP2 wants one dtype among the trainable parameters of a group: adapters of their own.
        if kind == "mixed_dtypes":
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
                    fully_shard(module, mesh=topology.mesh)
        for module in [*blocks, model]:
            fully_shard(module, mesh=topology.mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    generator = torch.Generator().manual_seed(topology.rank)
    losses = []
    crossed: list[str] = []
    for _ in range(STEPS):
        before: dict[Any, int] = {}
        if engine == "fcdp":
            before = {u: entry.generation for u, entry in engine_of(model).entries.items()}
        tokens = torch.randint(64, (2, 9), generator=generator)
        losses.append(
            take_step(model(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer)
        )
        if engine == "fcdp":
            entries = engine_of(model).entries
            crossed = [u.name for u, entry in entries.items() if entry.generation > before[u]]
    return losses, crossed


@pytest.mark.parametrize(
    ("kind", "ranks_per_node", "crossing"),
    [
        ("lora", 1, 1),  # small adapters of all blocks
        ("large_lora", 2, 2),  # a unit a block
        ("dora", 1, 1),
        ("mixed_dtypes", 1, 1),
        ("prefix", 1, 1),
        ("head", 1, 1),
    ],
)
def test_what_is_frozen_crosses_once_and_the_losses_are_fsdp2s(
    ranks: Pools, kind: str, ranks_per_node: int, crossing: int
) -> None:
    world_size = 2 * ranks_per_node
    expected = ranks.run(world_size, losses_of, kind, "fsdp2", ranks_per_node)
    actual = ranks.run(world_size, losses_of, kind, "fcdp", ranks_per_node)
    tolerance = 0.0 if world_size == 2 else 1e-6  # two summands have one order
    for (wanted, _), (got, crossed) in zip(expected, actual, strict=True):
        assert got == pytest.approx(wanted, rel=tolerance, abs=0.0)
        assert len(set(wanted)) == STEPS
        assert len(crossed) == crossing, crossed


MERGES = ("merge_adapter", "merge_and_unload")


def evaluated(engine: str, compares: bool, merge: str) -> list[float]:
    """Losses of an evaluation before and after adapters were merged, and of two after that.

    Between these another step is taken where there are adapters.

    ``compares=False``: as on an accelerator, where training does not compare contents.
    """
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    if engine != "fsdp2":
        fcdp.shard(model, topology, units=blocks)
        engine_of(model).staleness._compares = compares
    else:
        for module in [*blocks, model]:
            fully_shard(module, mesh=topology.mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=8.0)
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(topology.rank))

    def evaluate(model: Any) -> float:
        with torch.no_grad():
            return float(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

    whole: Any = model
    for _ in range(2):
        take_step(whole(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer)
    found = [evaluate(whole)]
    if merge == "merge_adapter":
        whole.merge_adapter()
        found.append(evaluate(whole))
        whole.unmerge_adapter()
        if engine != "fsdp2" and not compares:
            fcdp.invalidate(model)  # what follows computes gradients
        take_step(whole(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer)
    else:
        whole = whole.merge_and_unload()
    return [*found, evaluate(whole), evaluate(whole)]


def evaluated_in_every_way() -> dict[tuple[str, bool, str], list[float]]:
    plain = [("fsdp2", True, merge) for merge in MERGES]
    cases = [*plain, *product(("fcdp",), (True, False), MERGES)]
    return {case: evaluated(*case) for case in cases}


def test_an_evaluation_after_adapters_were_merged(ranks: Pools) -> None:
    for found in ranks.run(2, evaluated_in_every_way):
        for (engine, compares, merge), got in found.items():
            assert got == found["fsdp2", True, merge], (engine, compares, merge)


def warned_of(engine: str) -> tuple[str, int]:
    """What set-up warns of, and what this rank's gathers send in the second step."""
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    warned = io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger("fcdp").addHandler(handler)
    try:
        if engine == "shard":
            fcdp.shard(model, topology, units=blocks)
        else:
            for module in [*blocks, model]:
                fully_shard(module, mesh=topology.mesh)
            fcdp.cache_parameters(model, topology)
    finally:
        logging.getLogger("fcdp").removeHandler(handler)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    tokens = torch.randint(64, (2, 9))
    for _ in range(2):
        fcdp.ledger(model).reset()
        take_step(model(input_ids=tokens, labels=tokens, use_cache=False).loss, optimizer)
    sent = fcdp.ledger(model).snapshot()["inter_node"]
    return warned.getvalue(), sent["forward"] + sent.get("backward", 0)


def test_mixed_units_are_told_in_the_bytes_that_cross(ranks: Pools) -> None:
    (said, mixed), (nothing, _) = ranks.run(2, warned_of, "cache_parameters")
    (silent, split), _ = ranks.run(2, warned_of, "shard")
    assert f": {mixed:,} bytes per rank" in said
    assert f" {split:,} would; in other" in said
    assert said.count("\n") == 1
    assert nothing == silent == ""
    assert mixed > 10 * split > 0


def ignored_in_a_block() -> tuple[bool, bool, bool]:
    """Whether an ignored parameter stays whole and the others do not, and set-up is known again."""
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    kept = next(blocks[0].parameters())
    shape = kept.shape
    fcdp.shard(model, topology, units=blocks, ignored_params=[kept])
    held = [*model.parameters()]
    whole = [param for param in held if not isinstance(param, DTensor)]
    fcdp.shard(model, topology, units=blocks, ignored_params=[kept])  # changes nothing
    tokens = torch.randint(64, (2, 9))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    units = fcdp.ledger(model).misses
    return len(whole) == 1 and whole[0] is kept, kept.shape == shape, units > 0


def test_ignored_parameters_stay_whole(ranks: Pools) -> None:
    assert ranks.run(2, ignored_in_a_block) == [(True, True, True)] * 2


def misses_with_references() -> list[int]:
    """Gathers in each step whose backward follows a reference's pass, as DPO's does."""
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    fcdp.shard(model, topology, units=blocks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    tokens = torch.randint(64, (2, 9))
    misses = []
    for _ in range(3):
        fcdp.ledger(model).reset()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        with torch.no_grad():
            model(input_ids=tokens, labels=tokens, use_cache=False)
        take_step(loss, optimizer)
        misses.append(fcdp.ledger(model).misses)
    return misses


def test_adapters_cross_once_per_step_beside_a_reference(ranks: Pools) -> None:
    for _, *more in ranks.run(2, misses_with_references):
        assert more == [1, 1]
