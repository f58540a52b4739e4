"""FSDP2 over hierarchical exchanges: what it trains and overlaps, and how it fails."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from baselines.presets.collectives import HierarchicalGather
from baselines.strategy import load
from fcdp.failure import RankFailed
from fcdp.in_flight import HostReduceScatter, InFlight
from tests.baselines.jobs import job
from tests.baselines.training import Settings, Tuning, batches_of, built, made, noting, step
from tests.fcdp.training import topology_of
from tests.ranks import Pools, RankPool

NAME = "fsdp2-hierarchical"
STEPS = 3


def wide_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=sequences[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def trained(strategy: str, tuning: Tuning, nodes: int, ranks: int, count: int) -> list[Any]:
    """This rank's parts of all parameters after some steps in float64."""
    model, blocks = built("gpt2", tuning)
    topology = topology_of(nodes, ranks)
    own = {"dtype": torch.float64, "accumulation": count, "loss": wide_loss}
    trainable = load(strategy)(model.double(), job(topology, blocks, **own))
    batches = batches_of(topology.rank)
    for _ in range(STEPS):
        step(trainable, batches)
    params = [param.detach() for param in trainable.model.parameters()]
    assert all(isinstance(param, DTensor) for param in params)
    return [param.to_local() for param in params if isinstance(param, DTensor)]


@pytest.mark.parametrize(
    ("tuning", "nodes", "ranks_per_node", "count"),
    [("full", 1, 4, 2), ("full", 3, 1, 3), ("lora", 2, 2, 2)],
)
def test_parameters_are_fsdp2s(
    ranks: Pools, tuning: Tuning, nodes: int, ranks_per_node: int, count: int
) -> None:
    sizes = tuning, nodes, ranks_per_node, count
    theirs, ours = (
        ranks.run(nodes * ranks_per_node, trained, strategy, *sizes) for strategy in ("fsdp2", NAME)
    )
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def order() -> list[str]:
    """Operations of a step of two micro-batches, one after another."""
    trainable, batches = made(NAME, Settings("gpt2", "full", ranks_per_node=2, accumulation=2))
    step(trainable, batches)
    log: list[str] = []
    blocks = [*trainable.job.blocks]

    def computes(index: int) -> Callable[..., None]:
        """Note that the block's inner part is computed, and differentiated."""

        def hook(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            log.append(f"forward {index}")
            output.register_hook(lambda gradient: log.append(f"backward {index}"))

        return hook

    for index, block in enumerate(blocks):
        block.get_submodule("mlp").register_forward_hook(computes(index))

    def note(word: str, module: nn.Module) -> None:
        log.append(f"{word} {blocks.index(module) if module in blocks else 'root'}")

    with (
        noting(HierarchicalGather, "__call__", lambda of, *_, **__: note("gather", of._module)),
        noting(HostReduceScatter, "__call__", lambda of, *_, **__: note("reduce", of._unit.module)),
        noting(InFlight, "_finish_oldest", lambda of: note("wait", of._crossings[0].unit.module)),
    ):
        step(trainable, batches)
    return log


def test_gathers_and_sums_run_ahead_in_every_micro_batch(ranks: Pools) -> None:
    log = ranks.run(4, order)[0]
    half = len(log) // 2
    assert log[:half] == log[half:]
    assert log[:half] == [
        *("gather root", "gather 0", "gather 1", "forward 0", "forward 1"),
        *("gather 1", "gather 0", "backward 1", "reduce 1"),
        *("backward 0", "reduce 0", "reduce root", "wait 1", "wait 0", "wait root"),
    ]


def fails() -> tuple[str, float]:
    """The error of a step on this rank when another one's process ends, and its seconds."""
    trainable, batches = made(NAME, Settings("gpt2", "full", ranks_per_node=2))
    topology = trainable.job.topology
    step(trainable, batches)

    def hook(module: nn.Module, inputs: object) -> None:
        raise ValueError("no label")

    if topology.rank == 3:
        trainable.job.blocks[1].register_forward_pre_hook(hook)
    began = time.monotonic()
    try:
        step(trainable, batches)
    except ValueError as error:
        topology.failures.announce(error, final=True)  # as its process does at its end
        raised = "no label"
    except RankFailed as error:
        raised = str(error)
    return raised, time.monotonic() - began


@pytest.mark.ranks
def test_ranks_that_wait_for_one_that_failed_raise_soon() -> None:
    with closing(RankPool(4)) as own_ranks:  # no other test uses them afterwards
        *others, (own, _) = own_ranks.run(fails)
    assert own == "no label"
    for raised, took in others:
        assert raised == "rank 3 failed: ValueError: no label"
        assert took < 30
