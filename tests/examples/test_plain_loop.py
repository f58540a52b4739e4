"""The plain loop trains, prints what it says, and moves the bytes of its closed form."""

import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from examples import plain_loop
from fcdp.counts import Ledger, Link, Phase
from tests import programs
from tests.examples.launch import printed
from tests.programs import ROOT
from tests.ranks import Pools, on_ranks

STEP = re.compile(r"step (\d+): loss (\d\.\d{4}), gradient norm \d+\.\d{3}")


def losses_in(lines: list[str]) -> list[float]:
    """The losses of steps 0, 1, ..., one line each, up to the ledger."""
    steps = [match for match in map(STEP.fullmatch, lines) if match]
    assert [int(match[1]) for match in steps] == list(range(len(steps)))
    return [float(match[2]) for match in steps]


def train_adapters() -> list[str]:
    arguments = "--nodes 2 --layers 2 --lora-rank 2 --steps 3 --accumulation 2 --lr 0.01"
    return printed(plain_loop, arguments.split(), ranks_per_node=2)


def test_lora_sends_frozen_weights_once(ranks: Pools) -> None:
    lines, *others = ranks.run(4, train_adapters)
    assert others == [[], [], []], "only one rank prints"
    losses = losses_in(lines)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    # Across nodes: the root and two blocks once ever, the adapters, which share a unit, once a
    # step. From the cache: the rest of 2 micro-batches × 3 steps, in forward for all four units
    # and in backward for the two blocks.
    assert "hits 30 (83% of gathers), misses 6" in lines
    links = ("between nodes", "inside the node", "host to device", "device to host")
    assert tuple(line[:15].rstrip() for line in lines[4:8]) == links
    # Of its largest shards, a rank's: the frozen ones once, adapters and their gradients per step.
    block = 64 * (3 + 1 + 4 + 4) * 64 + (3 + 1 + 4 + 1) * 64
    frozen = (256 + 64) * 64 + 256 * 64 + 256 + 2 * block
    adapters = 2 * 2 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))
    sent = frozen + 3 * 2 * adapters  # 4 bytes, of a fourth each
    assert lines[-1] == f"between nodes {sent:,} bytes, by the closed form {sent:,}"


@on_ranks(2)
def test_a_byte_that_no_closed_form_has_is_an_error() -> None:
    add = Ledger.add

    def added(ledger: Ledger, link: Link, phase: Phase, count: int) -> None:
        add(ledger, link, phase, count + (link == "inter_node"))

    arguments = ["--nodes", "2", "--layers", "1", "--steps", "1", "--accumulation", "1"]
    sentence = rf"^rank {dist.get_rank()} sent \d+ bytes between nodes, not \d+$"
    with mock.patch.object(Ledger, "add", added), pytest.raises(SystemExit, match=sentence):
        printed(plain_loop, arguments, ranks_per_node=1)


def test_torchrun_starts_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("imports everything once a rank: runs with --exhaustive")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples/plain_loop.py")]
    command += ["--nodes", "2", "--layers", "1", "--steps", "3", "--lr", "0.01"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = programs.printed(*command, folder=tmp_path, **variables)
    losses = losses_in(output.splitlines())
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    # Two units: once a step each across nodes; each again in the second micro-batch, and the
    # block in both backwards.
    assert "hits 12 (67% of gathers), misses 6" in output
