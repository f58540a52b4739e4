"""FSDP2 over hierarchical exchanges: what it trains and overlaps, and how it fails."""

import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.nn as nn

from baselines.presets.collectives import HierarchicalGather
from baselines.settings import Settings
from fcdp.failure import RankFailed
from fcdp.in_flight import HostReduceScatter, InFlight
from tests.baselines.pipeline.training import trained
from tests.baselines.training import SMALL, Run, noting, sent, step
from tests.ranks import Pools, RankPool

NAME = "fsdp2-hierarchical"
STEPS = 3


@pytest.mark.parametrize(
    "run",
    [
        Run(1, 4, 2, "gpt2", "full", steps=STEPS),
        Run(3, 1, 3, "gpt2", "full", steps=STEPS),
        Run(2, 2, 2, "gpt2", "lora", steps=STEPS),
    ],
    ids=["one node", "nodes of one", "lora"],
)
def test_parameters_are_fsdp2s(ranks: Pools, run: Run) -> None:
    theirs, ours = (
        ranks.run(run.world_size, trained, run, strategy, Settings())[0].params
        for strategy in ("fsdp2", NAME)
    )
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_bfloat16_is_as_near_as_it_rounds(ranks: Pools) -> None:
    run = Run(2, 2, 2, "llama", "lora", **SMALL | {"dtype": torch.bfloat16, "frozen": "bfloat16"})
    theirs, ours = (ranks.run(4, sent, run, strategy) for strategy in ("fsdp2", NAME))
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.losses == pytest.approx(expected.losses, rel=1e-3)


def order() -> list[str]:
    """Operations of a step of two micro-batches, one after another."""
    trainable, batches = Run(2, 2, 2, "gpt2", "full", **SMALL).made(NAME)
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
    trainable, batches = Run(2, 2, 1, "gpt2", "full", **SMALL).made(NAME)
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
