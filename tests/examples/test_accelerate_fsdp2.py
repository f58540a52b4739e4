"""One line turns FCDP on under accelerate's FSDP2, and changes no loss."""

import argparse
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate", reason="not in an environment made by `make setup`")
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

import fcdp
from examples import accelerate_fsdp2
from fcdp.engine import engine_of
from tests.examples.launch import fresh_accelerate, launched, printed
from tests.ranks import Pools

STEPS = 3
OPTIONS = argparse.Namespace(cpu=True, layers=2, steps=STEPS, accumulation=2)


def train_without_the_line() -> list[float]:
    with launched(1), fresh_accelerate(), mock.patch.object(fcdp, "cache_parameters"):
        return accelerate_fsdp2.train(OPTIONS)[1]


def train_with_it() -> dict[str, Any]:
    with launched(1), fresh_accelerate():
        model, losses = accelerate_fsdp2.train(OPTIONS)
    ledger = fcdp.ledger(model)
    return {
        "losses": losses,
        "units": [unit.name for unit in engine_of(model).units],
        "hits": ledger.hits,
        "misses": ledger.misses,
        "inter_node": dict(ledger.bytes["inter_node"]),
        "head": engine_of(model).units[-1].shard_bytes,
    }


def test_losses_are_those_of_fsdp2(ranks: Pools) -> None:
    expected = ranks.run(2, train_without_the_line)
    for losses, result in zip(expected, ranks.run(2, train_with_it), strict=True):
        assert result["losses"] == losses
        assert losses[-1] < losses[0]
        # accelerate makes units of the embedding and of the head with the last norm.
        units = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
        assert result["units"] == units
        # Once a step each across nodes; from the cache in the second forward, and in both
        # backwards but for the head, which stays gathered.
        # Once: the library learns here that the head is read again by the next micro-batch.
        assert (result["hits"], result["misses"]) == ((4 + 2 * 3) * STEPS - 1, 4 * STEPS + 1)
        # Gradients are reduced once a step as well: accelerate defers them without FCDP's help.
        gathered = result["inter_node"]["forward"] - result["head"]
        assert result["inter_node"]["reduce"] == gathered > 0
        assert result["inter_node"].get("backward", 0) == 0


def train_on_the_mesh_of_a_parallelism_config() -> tuple[str, int]:
    make_accelerator = accelerate_fsdp2.make_accelerator

    def with_mesh(cpu: bool, accumulation: int) -> Accelerator:
        accelerator = make_accelerator(cpu, accumulation)
        config = ParallelismConfig(dp_shard_size=2)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.get_device_mesh("cpu")
        return accelerator

    with (
        launched(1),
        fresh_accelerate(),
        mock.patch.object(accelerate_fsdp2, "make_accelerator", with_mesh),
    ):
        model, _ = accelerate_fsdp2.train(OPTIONS)
    (name,) = next(iter(model.parameters())).device_mesh.mesh_dim_names
    return name, fcdp.ledger(model).hits


def test_the_mesh_of_a_parallelism_config_is_accepted(ranks: Pools) -> None:
    assert ranks.run(2, train_on_the_mesh_of_a_parallelism_config)[0] == (
        "dp_shard_cp",
        10 * STEPS - 1,
    )


def accelerate_refuses_cpus() -> str:
    with launched(1), fresh_accelerate():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        return Accelerator(cpu=True, fsdp_plugin=plugin).distributed_type.value


def test_accelerate_needs_the_workaround_on_cpus(ranks: Pools) -> None:
    """Where this fails, ``_allow_fsdp2_on_cpu`` can go."""
    assert ranks.run(2, accelerate_refuses_cpus)[0] == "MULTI_CPU"


def run_main() -> list[str]:
    with fresh_accelerate():
        arguments = "--cpu --layers 1 --steps 1 --accumulation 1"
        return printed(accelerate_fsdp2, arguments.split(), ranks_per_node=2)


def test_nodes_come_from_the_launcher(ranks: Pools) -> None:
    by_rank = ranks.run(4, run_main)
    # accelerate prints once a node.
    assert [bool(lines) for lines in by_rank] == [True, False, True, False]
    assert by_rank[0][0].startswith("step 0: loss ")
    assert by_rank[0][1:] == ["2 gathers from the cache, 3 across nodes"]
