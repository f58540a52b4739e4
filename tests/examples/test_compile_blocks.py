"""Blocks compiled before ``fcdp.shard`` train as eager ones do, from the cache."""

import pytest
import torch

import fcdp
from examples import compile_blocks
from fcdp.engine import engine_of
from tests.examples.launch import printed
from tests.fcdp.training import topology_of
from tests.ranks import Pools

LAYERS, STEPS = 2, 3


def compare() -> dict[str, object]:
    topology = topology_of(2, 1)
    _, eager = compile_blocks.train(topology, None, LAYERS, STEPS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, compiled = compile_blocks.train(topology, "aot_eager", LAYERS, STEPS)
    ledger = fcdp.ledger(model)
    return {
        "eager": eager,
        "compiled": compiled,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "graph_breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "units": [unit.name for unit in engine_of(model).units],
        "hits": ledger.hits,
        "misses": ledger.misses,
    }


def test_compiled_blocks_train_as_eager_ones(ranks: Pools) -> None:
    for result in ranks.run(2, compare):
        assert result["compiled"] == pytest.approx(result["eager"], rel=0, abs=1e-5)
        assert result["compiled"][-1] < result["compiled"][0]
        assert 1 <= result["graphs"] <= LAYERS, "compiled once: blocks alike may share a graph"
        assert result["graph_breaks"] == {}
        assert result["units"] == ["root", "model.layers.0", "model.layers.1"]
        assert (result["hits"], result["misses"]) == (LAYERS * STEPS, (LAYERS + 1) * STEPS)


def run_main() -> list[str]:
    arguments = "--nodes 2 --backend aot_eager --layers 1 --steps 1"
    return printed(compile_blocks, arguments.split(), ranks_per_node=1)


def test_it_prints_steps_and_gathers(ranks: Pools) -> None:
    lines = ranks.run(2, run_main)[0]
    assert lines[0].startswith("step 0: loss ")
    assert lines[1:] == ["1 gathers from the cache, 2 across nodes"]
