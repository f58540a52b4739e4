"""Policies: the names are those of matrix files, and the pages' examples train."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fcdp
from fcdp.cache.named import _POLICIES, parse
from fcdp.engine import engine_of
from tests import programs
from tests.docs import block, table
from tests.fcdp.training import Settings, batches, loss_of, make_model, take_step, topology_of
from tests.ranks import Pools


def test_each_name_is_the_policy_beside_it() -> None:
    rows = table("reference.md", "names")
    names = [row["In a matrix file"].strip("`") for row in rows]
    assert [name.partition("(")[0] for name in names] == [*_POLICIES]
    for name, row in zip(names, rows, strict=True):
        directory = Path(tempfile.gettempdir())
        made = eval(row["In Python"].strip("`"), {"fcdp": fcdp, "directory": directory})
        assert parse(name) == made


def run_block(page: str, **names: Any) -> dict[str, Any]:
    """Run the page's block as a program of its own; return its names."""
    scope = {"__name__": "example", **names}
    exec(compile(block(page, "policy"), page, "exec", dont_inherit=True), scope)
    return scope


def train(policy: str) -> dict[str, Any]:
    """Two steps with adapters under the default policy, or one of the page's."""
    settings = Settings(adapter_rank=3)
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    model = make_model(settings)
    if policy == "call":
        run_block("reference.md", fcdp=fcdp, model=model, topology=topology)
    else:
        frozen_only = run_block("extend.md")["FrozenOnly"]
        chosen = frozen_only() if policy == "class" else fcdp.HostCache()
        fcdp.shard(model, topology, units=model.blocks, policy=chosen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = batches(settings, topology.rank)
    losses = [take_step(loss_of(model, next(data)), optimizer) for _ in range(2)]
    engine = engine_of(model)
    return {
        "losses": losses,
        "tiers": {(unit.trainable, engine.entries[unit].tier) for unit in engine.units},
        "host bytes": engine.ledger.host_cache_bytes,
    }


def test_the_class_caches_frozen_units_alone_and_no_policy_changes_a_loss(ranks: Pools) -> None:
    default, call, frozen = (ranks.run(4, train, policy)[0] for policy in ("host", "call", "class"))
    assert call["losses"] == frozen["losses"] == default["losses"]
    assert default["tiers"] == {(False, "host"), (True, "host")}
    assert call["tiers"] == {(False, "device"), (True, "device")}
    assert frozen["tiers"] == {(False, "host"), (True, None)}
    assert 0 < frozen["host bytes"] < default["host bytes"]


def test_the_example_is_a_policy_to_a_type_checker(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--exhaustive"):
        pytest.skip("half a minute: runs with --exhaustive")
    example = tmp_path / "example.py"
    source = block("extend.md", "policy")
    example.write_text(source + "\n\npolicy: fcdp.CachePolicy = FrozenOnly()\n")
    options = ("--config-file", "", "--strict", "--follow-imports=silent")
    programs.printed(sys.executable, "-m", "mypy", *options, example)
