"""docs/fsdp2.md lists FSDP2's whole public surface, and its refusals are raised."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.tensor import Replicate, distribute_tensor

import fcdp
from tests.docs import ROOT, table
from tests.fcdp.extended import Rounded, Wrapper
from tests.fcdp.training import topology_of
from tests.ranks import Pools


def rows() -> list[dict[str, str]]:
    return [row for name in ("fully_shard", "methods", "others") for row in table("fsdp2.md", name)]


def call_of(row: dict[str, str]) -> str:
    return row["Call"].partition(" (torch")[0].strip("`")


def surface() -> Iterator[str]:
    """Every public name of the installed FSDP2: functions, classes, methods, parameters."""
    for name in fsdp.__all__:
        value = getattr(fsdp, name)
        if value.__module__ != "torch.distributed.fsdp":
            continue  # FSDP1's
        yield name
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value)]
            yield from (f"{name}({field})" for field in fields)
            yield from (f"{name}.{member}" for member in public(value) if member not in fields)
        elif inspect.isclass(value):
            yield from (f"{name}.{member}" for member in public(value))
        elif name == "fully_shard":
            yield from (f"{name}({argument})" for argument in inspect.signature(value).parameters)


def public(value: type) -> list[str]:
    return [member for member in dir(value) if not member.startswith("_")]


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def test_every_public_name_has_one_row() -> None:
    listed = [call_of(row) for row in rows()]
    assert sorted(listed) == sorted(set(listed)), "twice"
    assert set(surface()) - set(listed) == set()


def test_every_row_is_there_or_for_another_torch() -> None:
    here, names = version(torch.__version__), set(surface())
    for row in rows():
        _, _, since = row["Call"].partition(" (torch > ")
        if call_of(row) in names:
            assert not since or here > version(since), call_of(row)
        else:
            assert since, call_of(row)


def test_every_row_has_a_test_that_exists() -> None:
    for row in [*rows(), *table("fsdp2.md", "beside")]:
        path, _, function = row["Test"].strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            row["Test"]
        )


def quoted(text: str) -> str:
    """The error that a cell quotes: the last of its code spans."""
    return re.findall(r"`([^`]+)`", text)[-1]


def test_refused_rows_are_in_the_table_of_refusals() -> None:
    refusals = [row["What"] for row in table("fsdp2.md", "refusals")]
    assert set(REFUSALS) == set(refusals)
    refused = [call_of(row) for row in rows() if row["What happens"].startswith("[refused]")]
    assert len(refused) == 4
    assert [call for call in refused if f"`{call}`" not in " ".join(refusals)] == []


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def more_ranks(topology: fcdp.Topology) -> None:
    """The topology is of every other rank."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("some", "other"))
    model = fully_shard(linears(), mesh=topology.mesh)
    fcdp.cache_parameters(model, fcdp.Topology.of_mesh(grid["some"], 1))


def named_dimensions(topology: fcdp.Topology) -> None:
    model, mesh = linears(), init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    for layer in model:
        for name, param in list(layer.named_parameters()):
            value = distribute_tensor(param.detach(), mesh, [Replicate()])
            setattr(layer, name, nn.Parameter(value))
    names = fsdp.DataParallelMeshDims(replicate="replicate")
    fully_shard(model, mesh=mesh, dp_mesh_dims=names)
    fcdp.cache_parameters(model, topology)


def integer(topology: fcdp.Topology) -> None:
    model = linears()
    fully_shard(model, mesh=topology.mesh, reshard_after_forward=2)
    fcdp.cache_parameters(model, topology)


def extension(topology: fcdp.Topology) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(Rounded(model.weight.detach()))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Wrapper, "__tensor_flatten__")
        fcdp.cache_parameters(fully_shard(model, mesh=topology.mesh), topology)


class Own(DefaultAllocMixin):
    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("FCDP must refuse it before it is called")


class OwnAllGather(Own, AllGather):
    pass


class OwnReduceScatter(Own, ReduceScatter):
    pass


#: Calls that take FCDP's place, and their arguments.
REPLACING: dict[str, tuple[Any, ...]] = {
    "set_custom_all_gather": (OwnAllGather(),),
    "set_custom_reduce_scatter": (OwnReduceScatter(),),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
}


def replacing(call: str) -> Callable[[fcdp.Topology], None]:
    def provoke(topology: fcdp.Topology) -> None:
        model = linears()
        sharded = fully_shard(model, mesh=topology.mesh)
        fcdp.cache_parameters(model, topology)
        getattr(sharded, call)(*REPLACING[call])
        sharded(torch.ones(1, 4))

    return provoke


#: Refused calls of the table, each with a provocation on two nodes of one or two ranks.
REFUSALS: dict[str, tuple[int, Callable[[fcdp.Topology], None]]] = {
    "`fully_shard(mesh)` of ranks that the topology lacks": (2, more_ranks),
    "`DataParallelMeshDims(replicate)` without `shard`": (1, named_dimensions),
    "`fully_shard(reshard_after_forward)` with an integer": (2, integer),
    "`fully_shard(module)` of gather extensions (`fsdp_pre_all_gather`) without "
    "`__tensor_flatten__`": (1, extension),
    **{f"`FSDPModule.{call}`": (1, replacing(call)) for call in REPLACING},
}


def refuse(refusal: str) -> str:
    ranks_per_node, provoke = REFUSALS[refusal]
    with pytest.raises((ValueError, AssertionError, RuntimeError)) as error:
        provoke(topology_of(2, ranks_per_node))
    return str(error.value)


@pytest.mark.parametrize("row", table("fsdp2.md", "refusals"), ids=lambda row: row["What"])
def test_what_is_refused(ranks: Pools, row: dict[str, str]) -> None:
    refusal = row["What"]
    call = re.findall(r"`([^`]+)`", refusal)[0]
    if call not in set(surface()):
        pytest.skip(f"this torch has no {call}")
    for message in ranks.run(2 * REFUSALS[refusal][0], refuse, refusal):
        assert quoted(row["Error"]) in message


def before_set_up(call: str) -> str:
    topology = topology_of(2, 1)
    sharded = fully_shard(linears(), mesh=topology.mesh)
    getattr(sharded, call)(*REPLACING[call])
    with pytest.raises(ValueError, match="has a custom collective") as error:
        fcdp.cache_parameters(sharded, topology)
    return str(error.value)


# Symmetric memory needs a device.
@pytest.mark.parametrize("call", sorted({*REPLACING} - {"set_symm_mem_for_comm"}))
def test_collectives_of_others_are_refused_at_set_up(ranks: Pools, call: str) -> None:
    (error,) = [row["Error"] for row in table("fsdp2.md", "refusals") if call in row["What"]]
    for message in ranks.run(2, before_set_up, call):
        assert re.findall(r"`([^`]+)`", error)[0] in message
