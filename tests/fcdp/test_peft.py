"""Parameters that peft and users freeze, add and unfreeze train like FSDP2 (paper: FCDP-Comm)."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import captured, take_step, topology_of
from tests.fcdp.tuners import small_llama
from tests.ranks import Pools, on_ranks

STEPS = 4


def make_model(kind: str) -> tuple[nn.Module, list[nn.Module]]:
    import peft

    model = small_llama()
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


def set_up(model: nn.Module, blocks: list[nn.Module], topology: fcdp.Topology, how: str) -> None:
    """Shard by ``fcdp.shard`` or ``fully_shard``, and by ``fcdp.cache_parameters`` if asked."""
    if how == "shard":
        fcdp.shard(model, topology, units=blocks)
        return
    # FSDP2 wants one dtype among the trainable parameters of a group: adapters of their own.
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    if len({each.weight.dtype for each in linears}) > 1:
        for module in linears:
            if module.weight.dtype == torch.float32:
                fully_shard(module, mesh=topology.mesh)
    for module in [*blocks, model]:
        fully_shard(module, mesh=topology.mesh)
    if how == "cache_parameters":
        fcdp.cache_parameters(model, topology)


def optimizer_of(model: nn.Module, rate: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def losses_of(kind: str, how: str, ranks_per_node: int) -> tuple[list[float], list[str]]:
    """Losses of four steps, and the units that were gathered across nodes in the last."""
    topology = topology_of(2, ranks_per_node)
    model, blocks = make_model(kind)
    set_up(model, blocks, topology, how)
    entries = engine_of(model).entries if how == "shard" else {}
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(topology.rank)
    losses, before = [], {}
    for _ in range(STEPS):
        before = {unit: entry.generation for unit, entry in entries.items()}
        tokens = torch.randint(64, (2, 9), generator=generator)
        losses.append(take_step(loss_of(model, tokens), optimizer))
    return losses, [u.name for u, entry in entries.items() if entry.generation > before[u]]


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
    ranks.run(2 * ranks_per_node, trains_as_fsdp2, kind, ranks_per_node, crossing)


def trains_as_fsdp2(kind: str, ranks_per_node: int, crossing: int) -> None:
    expected, _ = losses_of(kind, "fsdp2", ranks_per_node)
    losses, crossed = losses_of(kind, "shard", ranks_per_node)
    tolerance = 0.0 if ranks_per_node == 1 else 1e-6  # two summands have one order
    assert losses == pytest.approx(expected, rel=tolerance, abs=0.0)
    assert len(set(expected)) == STEPS
    assert len(crossed) == crossing, crossed


def evaluated(how: str, compares: bool, merge: str) -> list[float]:
    """Losses of an evaluation before and after adapters were merged, and of two after that.

    Between these another step is taken where there are adapters.

    ``compares=False``: as on an accelerator, where training does not compare contents.
    """
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    set_up(model, blocks, topology, how)
    if how == "shard":
        engine_of(model).staleness._compares = compares
    optimizer = optimizer_of(model, rate=8.0)
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(topology.rank))

    @torch.no_grad()
    def evaluate(model: Any) -> float:
        return float(loss_of(model, tokens))

    whole: Any = model
    for _ in range(2):
        take_step(loss_of(whole, tokens), optimizer)
    losses = [evaluate(whole)]
    if merge == "merge_adapter":
        whole.merge_adapter()
        losses.append(evaluate(whole))
        whole.unmerge_adapter()
        if how == "shard" and not compares:
            fcdp.invalidate(model)  # what follows computes gradients
        take_step(loss_of(whole, tokens), optimizer)
    else:
        whole = whole.merge_and_unload()
    return [*losses, evaluate(whole), evaluate(whole)]


@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
@on_ranks(2)
def test_an_evaluation_after_adapters_were_merged(merge: str) -> None:
    expected = evaluated("fsdp2", True, merge)
    for compares in (True, False):
        assert evaluated("shard", compares, merge) == expected, compares


def warned_of(how: str) -> tuple[str, int]:
    """Return the warning of set-up, and the bytes that gathers send in the second step."""
    model, blocks = make_model("lora")
    with captured() as (_, warned):
        set_up(model, blocks, topology_of(2, 1), how)
    optimizer, tokens = optimizer_of(model), torch.randint(64, (2, 9))
    for _ in range(2):
        fcdp.ledger(model).reset()
        take_step(loss_of(model, tokens), optimizer)
    sent = fcdp.ledger(model).snapshot()["inter_node"]
    return warned.getvalue(), sent["forward"] + sent.get("backward", 0)


def test_a_warning_of_mixed_units_has_the_bytes_that_cross(ranks: Pools) -> None:
    (warning, mixed), (nothing, _) = ranks.run(2, warned_of, "cache_parameters")
    (silent, split), _ = ranks.run(2, warned_of, "shard")
    assert f": {mixed:,} bytes per rank" in warning
    assert f" {split:,} would; in other" in warning
    assert warning.count("\n") == 1
    assert nothing == silent == ""
    assert mixed > 10 * split > 0


@on_ranks(2)
def test_ignored_parameters_stay_whole() -> None:
    topology = topology_of(2, 1)
    model, blocks = make_model("lora")
    ignored = next(blocks[0].parameters())
    shape = ignored.shape
    fcdp.shard(model, topology, units=blocks, ignored_params=[ignored])
    held = [*model.parameters()]
    whole = [param for param in held if not isinstance(param, DTensor)]
    fcdp.shard(model, topology, units=blocks, ignored_params=[ignored])  # changes nothing
    loss_of(model, torch.randint(64, (2, 9))).backward()
    assert [param is ignored for param in whole] == [True]
    assert ignored.shape == shape
    assert fcdp.ledger(model).misses > 0


@on_ranks(2)
def test_adapters_cross_once_per_step_beside_a_reference() -> None:
    """The reference's pass lies between a forward and its backward, as in DPO."""
    model, blocks = make_model("lora")
    set_up(model, blocks, topology_of(2, 1), "shard")
    optimizer, tokens = optimizer_of(model), torch.randint(64, (2, 9))
    misses = []
    for _ in range(3):
        fcdp.ledger(model).reset()
        loss = loss_of(model, tokens)
        with torch.no_grad():
            loss_of(model, tokens)
        take_step(loss, optimizer)
        misses.append(fcdp.ledger(model).misses)
    assert misses[1:] == [1, 1], misses
