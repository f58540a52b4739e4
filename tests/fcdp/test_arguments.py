"""Mistakes of the first hour: each has one line that says what is wrong and what is allowed."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.arguments import Setup
from fcdp.cache.policy import Fixed
from fcdp.delta import huffman
from fcdp.delta.difference import prepare
from fcdp.engine import engine_of
from tests.fcdp.training import Settings, batches, captured, loss_of, make_model, topology_of
from tests.ranks import Pools, on_ranks

SETTINGS = Settings(2, 1)

#: Arguments in place of the right ones, and how the error begins.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt2"}, "model = 'gpt2': must be a torch.nn.Module"),
    ({"topology": 2}, "topology = 2: must be a fcdp.Topology"),
    (
        {"mp_policy": torch.bfloat16},
        "mp_policy = dtype: must be a torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
    (
        {"offload_policy": True},
        "offload_policy = True: must be a torch.distributed.fsdp.OffloadPolicy",
    ),
    (
        {"policy": fcdp.HostCache},
        "policy = HostCache (the class, not HostCache()): must be a policy such as",
    ),
    ({"policy": 4}, "policy = 4: must be a policy such as fcdp.HostCache(), or a name: "),
    ({"policy": "ram"}, "policy = 'ram': allowed are none, device, host"),
    ({"policy": fcdp.DiskCache(Path("/no/such"))}, "directory = '/no/such"),
    ({"units": 3}, "units = 3: must be a list of modules"),
    ({"units": nn.Linear(2, 2)}, "units = Linear: must be a list of modules"),
    ({"units": ["blocks.0"]}, "units[0] = 'blocks.0': must be a module of the model"),
    ({"cache": "host"}, "cache = 'host': must be a fcdp.CacheOptions"),
    (
        {"comm": fcdp.CommOptions},
        "comm = CommOptions (the class, not CommOptions()): must be a fcdp.CommOptions",
    ),
    ({"reshard_after_forward": 2}, "reshard_after_forward = 2: "),
]


@on_ranks(2)
def test_mistakes_are_refused_and_leave_the_model_as_it_was() -> None:
    model, topology = make_model(SETTINGS), topology_of(2, 1)
    twice = {"units": [*model.blocks, model.blocks[0]]}
    mistakes = [*MISTAKES, (twice, "units[2]: is units[0] again; each counts once")]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            fcdp.shard(**{"model": model, "topology": topology, "units": model.blocks, **wrong})
        assert not fcdp.is_cached(model)
    fcdp.shard(model, topology, units=model.blocks)


@dataclass(frozen=True)
class Tiers:
    """A user's policy, which prefers the same tiers for each unit."""

    preference: Any
    directory = None

    def place(self, units: Any, topology: fcdp.Topology) -> Any:
        return Fixed(dict.fromkeys(units, self.preference))


@on_ranks(2)
def test_a_policy_with_a_tier_that_is_not_there_is_refused_at_set_up() -> None:
    model, topology = fully_shard(make_model(SETTINGS)), topology_of(2, 1)
    for preference, wrong in ((("disk",), "disk"), (("host", "gpu"), "gpu"), ("host", "h")):
        with pytest.raises(ValueError, match=f"'{wrong}' must be one of device, host"):
            fcdp.cache_parameters(model, topology, policy=Tiers(preference))
        assert not fcdp.is_cached(model)
    fcdp.cache_parameters(model, topology, policy=Tiers(("device", "host")))


@on_ranks(4)
def test_a_codec_whose_packages_a_rank_lacks_is_refused_on_all_before_anything_is_sharded() -> None:
    model, topology = make_model(SETTINGS), topology_of(4, 1)
    whole, asked = fully_shard(make_model(SETTINGS)), re.escape('pip install "fcdp[differences]"')
    missing = {huffman.ZSTD: None} if topology.rank == 3 else {}
    for comm in (
        fcdp.CommOptions(gather_codec=fcdp.Delta()),
        fcdp.CommOptions(reduce_codec=fcdp.Exact()),
    ):
        prepare.cache_clear()
        with mock.patch.dict(sys.modules, missing):
            with pytest.raises(ValueError, match=asked):
                fcdp.shard(model, topology, comm=comm)
            with pytest.raises(ValueError, match=asked):
                fcdp.cache_parameters(whole, topology, comm=comm)
        assert not fcdp.is_cached(whole)
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        fcdp.shard(make_model(SETTINGS), topology, comm=comm)
    with mock.patch.dict(sys.modules, missing):
        fcdp.shard(model, topology, comm=fcdp.CommOptions(gather_codec=fcdp.BlockInt8()))


def test_whatever_differs_from_the_set_up_before_has_its_arguments_name() -> None:
    cache, comm = fcdp.CacheOptions(), fcdp.CommOptions()
    named = Setup((2, 1), fcdp.HostCache(), cache=cache, comm=comm)._arguments()
    assert [*named] == ["topology", "policy", *vars(cache), *vars(comm)]


def output_of(nodes: int, ranks_per_node: int, arguments: dict[str, Any]) -> tuple[str, str]:
    with captured() as (printed, warned):
        fcdp.shard(make_model(SETTINGS), topology_of(nodes, ranks_per_node), **arguments)
    return printed.getvalue(), warned.getvalue()


#: By shape and arguments: how the line begins that rank 0 prints, and the lines that it warns.
PAIR = (2, 1)
SUMS = "; partial gradients of fcdp.accumulate: 4.422 KiB on each device"
EACH = fcdp.CommOptions(partial_gradients="each")
OUTPUT: list[tuple[tuple[int, int], dict[str, Any], str, list[str]]] = [
    (PAIR, {"policy": "host"}, "3 units: 3 host; ", []),
    (PAIR, {"policy": "none"}, f"3 units: 3 gathered across nodes{SUMS}\n", []),
    (PAIR, {"policy": "device"}, f"3 units: 3 device{SUMS}\n", []),
    (PAIR, {"policy": "device", "comm": EACH}, "3 units: 3 device\n", []),
    (PAIR, {"policy": "disk"}, "3 units: 3 disk; ", []),
    (PAIR, {"policy": "auto"}, "3 units: 3 device or host; ", []),
    (PAIR, {"policy": fcdp.Budget(host=3000)}, "3 units: 1 gathered across nodes, 2 host; ", []),
    (
        (2, 2),
        {"comm": fcdp.CommOptions(partial_gradients="host")},
        "3 units: 3 host; 48 KiB of host memory per node, "
        "2 × (cache 12 KiB, partial gradients 12 KiB)\n",
        [],
    ),
    (
        (1, 2),
        {},
        "3 units, on one node: nothing crosses nodes, and nothing is cached "
        "(fcdp.Topology.build(2, 1) tries 2 nodes)\n",
        [],
    ),
    (
        PAIR,
        {"units": []},
        "1 unit: 1 host; ",
        ["fcdp.shard: units is empty, so that the whole model is gathered at"],
    ),
    (
        PAIR,
        {"policy": fcdp.Budget(device=2, host=16)},  # gigabytes in the place of bytes
        "3 units: ",
        ["policy: device = 2: no unit fits", "policy: host = 16: no unit fits"],
    ),
]


@pytest.mark.parametrize(("shape", "arguments", "line", "warnings"), OUTPUT)
def test_one_line_says_where_every_unit_lies_and_what_it_takes(
    ranks: Pools, shape: tuple[int, int], arguments: dict[str, Any], line: str, warnings: list[str]
) -> None:
    (printed, warned), *others = ranks.run(shape[0] * shape[1], output_of, *shape, arguments)
    assert printed.startswith(f"fcdp: {line}")
    assert printed.count("\n") == 1
    for text, expected in zip(warned.splitlines(), warnings, strict=True):
        assert text.startswith(expected)
    assert {*others} == {("", "")}


@on_ranks(2)
def test_units_left_out_are_the_blocks() -> None:
    model = make_model(SETTINGS)
    topology = topology_of(2, 1)
    fcdp.shard(model, topology)
    assert [unit.name for unit in engine_of(model).units] == ["root", "blocks.0", "blocks.1"]


@pytest.mark.parametrize("how", ["shard", "fully_shard"])
@on_ranks(2)
def test_an_optimizer_made_before_sharding_is_refused_at_its_step(how: str) -> None:
    topology = topology_of(2, 1)
    model = make_model(SETTINGS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if how == "shard":
        fcdp.shard(model, topology)
    else:
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=topology.mesh)
        fcdp.cache_parameters(model, topology)
    loss_of(model, next(batches(SETTINGS, topology.rank))).backward()
    message = (
        "^AdamW: 15 of its 15 parameters are the model's no longer.*"
        "Make the optimizer after fcdp.shard or fully_shard$"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_repr_is_one_readable_line() -> None:
    topology = topology_of(2, 1)
    place = f"rank {topology.rank} = node {topology.rank}, local rank 0, cpu"
    assert repr(topology) == f"Topology(2 nodes × 1 rank, {place})"
    model = make_model(SETTINGS)
    fcdp.shard(model, topology)
    loss_of(model, next(batches(SETTINGS, topology.rank))).backward()
    counts = fcdp.ledger(model)
    assert re.fullmatch(r"Ledger\(between nodes .*; 2 hits, 3 misses\)", repr(counts)), counts
    lines = counts.table().splitlines()
    assert lines[0].split()[4:] == ["forward", "backward", "reduce", "total"]
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "between nodes",
        "host to device",
        "device to host",
        "hits 2 (40% of gathers), misses 3",
        "gradients reduced in float32",
        "cache on the host 12 KiB",
    ]
    assert len({len(line) for line in lines[:4]}) == 1
