"""A callback turns FCDP on under the Trainer's FSDP2, and changes no loss."""

import argparse
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("accelerate", reason="not in an environment made by `make setup`")

import fcdp
from examples import trainer_fsdp2
from tests.examples.launch import fresh_accelerate, launched, printed
from tests.ranks import Pools

STEPS = 3
OPTIONS = argparse.Namespace(cpu=True, layers=2, steps=STEPS)


def train_without_fcdp(output: str) -> list[float]:
    with launched(1), fresh_accelerate(), mock.patch.object(fcdp, "cache_parameters"):
        return trainer_fsdp2.train(OPTIONS, output)[1]


def train_with_it(output: str) -> tuple[list[float], int, int]:
    with launched(1), fresh_accelerate():
        model, losses = trainer_fsdp2.train(OPTIONS, output)
    return losses, fcdp.ledger(model).hits, fcdp.ledger(model).misses


def test_losses_are_those_of_fsdp2(ranks: Pools, tmp_path: Path) -> None:
    expected = ranks.run(2, train_without_fcdp, str(tmp_path))[0]
    losses, hits, misses = ranks.run(2, train_with_it, str(tmp_path))[0]
    assert losses == expected
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    # As with accelerate: four units, two micro-batches, the head stays gathered.
    # Once: the library learns here that the root is read again by the next micro-batch.
    assert (hits, misses) == ((4 + 2 * 3) * STEPS - 1, 4 * STEPS + 1)


def run_main() -> list[str]:
    with fresh_accelerate():
        return printed(trainer_fsdp2, ["--cpu", "--layers", "1", "--steps", "1"], ranks_per_node=1)


def test_it_prints_the_gathers(ranks: Pools) -> None:
    lines, others = ranks.run(2, run_main)
    assert lines[-1] == "6 gathers from the cache, 4 across nodes"
    assert lines[-1] not in others
