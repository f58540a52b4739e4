"""What FSDP2 refuses halfway is refused before anything is sharded; a list is one unit of several.

Smallest case: one parameter tied across two blocks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.extended import CLASSES
from tests.fcdp.training import topology_of
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


def tied(first: str, second: str) -> Callable[[], Net]:
    """A model of which two modules have one weight, or are one where the names end alike."""

    def make() -> Net:
        model = Net()
        model.get_submodule(second).weight = model.get_submodule(first).weight
        return model

    return make


def tied_thrice() -> Net:
    model = BLOCKS()
    model.head.weight = model.layers[0][0].weight  # type: ignore[index]
    return model


def shared() -> Net:
    """A model with one module inside of two blocks."""
    model = Net()
    model.layers[3][0] = model.layers[1][0]  # type: ignore[index,operator]
    return model


def scalar() -> Net:
    model = Net()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    return model


def transposed() -> Net:
    """A model with a parameter whose memory is another's, turned."""
    model = Net()
    model.layers[3][0].weight = nn.Parameter(torch.ones(8, 4).t())  # type: ignore[index]
    return model


def held_by_the_model() -> Net:
    """A model that holds a parameter of two blocks too, in a module that is never called."""
    model = Net()
    model.bank = nn.ParameterDict({"a": torch.ones(4)})
    for layer in model.layers[:2]:
        layer.bank = model.bank
    return model


def lazy() -> Net:
    model = Net()
    model.layers[3].append(nn.LazyLinear(4, device="cpu"))  # type: ignore[operator]
    return model


def scripted() -> Net:
    model = Net()
    model.layers[3][0] = torch.jit.script(model.layers[3][0])  # type: ignore[index,operator]
    return model


BLOCKS, HEAD = tied("layers.0.0", "layers.2.0"), tied("layers.1.0", "head")
CASES: dict[str, tuple[Callable[[], Net], Callable[[Any], Any], str]] = {
    "two blocks": (
        BLOCKS,
        lambda model: None,
        "layers.0.0.weight and layers.2.0.weight are one parameter, in two units; must be in one: "
        "a list of modules, units=[[model.layers.0, model.layers.2], ...]",
    ),
    "a block and the head": (HEAD, lambda model: None, "[[model.layers.1, model.head], ...]"),
    "one module in two": (
        shared,
        lambda model: None,
        "layers.1.0.weight and layers.3.0.weight are one parameter, in two units; must be in one: "
        "a list of modules, units=[[model.layers.1, model.layers.3], ...]",
    ),
    "the model's own": (
        held_by_the_model,
        lambda model: None,
        "units: layers.0.bank.a, layers.1.bank.a and bank.a are one parameter, in 3 units; one is "
        "the model's own, which holds it itself or in a module that has no forward: leave the "
        "other units out of units",
    ),
    "no shape": (lazy, lambda model: [*model.layers], "layers.3.2.weight: has no shape yet"),
    "a script": (scripted, lambda model: [*model.layers], "layers.3.0: is a ScriptModule"),
    "two lists": (
        BLOCKS,
        lambda model: [[*model.layers[:2]], [*model.layers[2:]]],
        "layers.0.0.weight and layers.2.0.weight are one parameter, in two units; must be in one: "
        "a list of modules, units=[[model.layers.0, model.layers.1, model.layers.2, "
        "model.layers.3], ...]",
    ),
    "two blocks and the head": (
        tied_thrice,
        lambda model: None,
        "layers.0.0.weight, layers.2.0.weight and head.weight are one parameter, in 3 units; must "
        "be in one: a list of modules, units=[[model.layers.0, model.layers.2, model.head], ...]",
    ),
    "a scalar": (scalar, lambda model: None, "temperature: has no dimension to shard"),
    "a container": (
        Net,
        lambda model: [model.layers],
        "units: layers has no forward; pass its members",
    ),
    "a module twice": (
        Net,
        lambda model: [model.layers[0], [model.layers[1], model.layers[0]]],
        "units[1][1]: is units[0] again",
    ),
    "nothing": (Net, lambda model: [[model.layers[0]], []], "units[1]: is an empty list"),
    "no rows in a row": (transposed, lambda model: None, "layers.3.0.weight: its memory is not"),
    "no module": (Net, lambda model: [[model.layers[0], 3]], "units[0][1] = 3: must be a module"),
}


@pytest.mark.parametrize("alone", [False, True])
@on_ranks(2)
def test_a_refusal_changes_nothing(alone: bool) -> None:
    """Rank 0 refuses, too, where rank 1 alone has a reason, and names that rank."""
    topology = topology_of(2, 1)
    refuses = topology.rank == 1 or not alone
    for make, units, words in CASES.values():
        model = make() if refuses else Net()
        begin = "" if refuses else "^fcdp.shard: rank 1: "
        with pytest.raises(ValueError, match=begin) as raised:
            fcdp.shard(model, topology, units=units(model) if refuses else None)
        assert words in str(raised.value)
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert not fcdp.is_cached(model)


def frozen(model: Net) -> None:
    model.head.requires_grad_(False)


def deeper(model: Net) -> None:
    model.layers.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def packed(model: Net) -> None:
    weight = CLASSES["packed"](model.layers[3][0].weight.detach())  # type: ignore[index]
    model.layers[3][0].weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[index]


VERIFIED, FLAT = fcdp.CacheOptions(verify=True), fcdp.CommOptions(exchanges="flat")
ROUNDED = fcdp.CommOptions(gather_codec=fcdp.BlockInt8())
#: Acts of rank 1, its options, and the word that the refusal begins with.
DIFFERENT: list[tuple[Callable[[Net], None], Callable[[Net], dict[str, Any]], str]] = [
    (frozen, lambda model: {}, "model"),
    (deeper, lambda model: {}, "model"),
    (packed, lambda model: {}, "model"),
    (lambda model: None, lambda model: {"policy": "device"}, "policy"),
    (lambda model: None, lambda model: {"cache": VERIFIED}, "verify"),
    (lambda model: None, lambda model: {"comm": FLAT}, "exchanges"),
    (lambda model: None, lambda model: {"comm": ROUNDED}, "gather_codec"),
    (lambda model: None, lambda model: {"units": []}, "units"),
    (lambda model: None, lambda model: {"units": [*model.layers][::-1]}, "units"),
]


@on_ranks(2)
def test_ranks_that_differ_are_refused_on_all() -> None:
    topology = topology_of(2, 1)
    for change, options, word in DIFFERENT:
        model = Net()
        model.layers[3].requires_grad_(False)
        if topology.rank == 1:
            change(model)
        with pytest.raises(ValueError, match=f"{word}: differs between ranks"):
            fcdp.shard(model, topology, **(options(model) if topology.rank == 1 else {}))
        assert not any(isinstance(param, DTensor) for param in model.parameters())
    model = Net()
    fully_shard(model, mesh=topology.mesh)
    with pytest.raises(ValueError, match="policy: differs"):
        fcdp.cache_parameters(model, topology, "device" if topology.rank == 1 else "host")
    with pytest.raises(ValueError, match="exchanges: differs"):
        fcdp.cache_parameters(model, topology, comm=FLAT if topology.rank else fcdp.CommOptions())
    assert not fcdp.is_cached(model)


class Unsplit(nn.Sequential):
    def parameters(self, recurse: bool = True) -> Any:
        raise LookupError("lists no parameters")


class Final(nn.Sequential):
    """A class that has no subclass, as ``fully_shard`` makes one."""

    def __init_subclass__(cls) -> None:
        raise TypeError("has no subclass")


class Placeless:
    directory = None

    def place(self, units: Any, topology: fcdp.Topology) -> Any:
        if topology.rank == 1:
            raise LookupError("finds no place")
        return fcdp.HostCache().place(units, topology)


#: A class of rank 1's last layer, and the arguments of all ranks.
FAILS_ALONE: dict[str, tuple[type[nn.Sequential], dict[str, Any]]] = {
    "lists no parameters": (Unsplit, {}),
    "has no subclass": (Final, {}),
    "finds no place": (nn.Sequential, {"policy": Placeless()}),
}


@pytest.mark.parametrize("words", FAILS_ALONE)
@on_ranks(2)
def test_what_fails_on_one_rank_alone_is_an_error_on_all(words: str) -> None:
    topology, (kind, arguments) = topology_of(2, 1), FAILS_ALONE[words]
    model: Any = Net()
    if topology.rank == 1:
        model.layers[3] = kind(*model.layers[3])
    begin = "" if topology.rank == 1 else "rank 1: "
    with pytest.raises((LookupError, TypeError, RuntimeError), match=f"{begin}{words}"):
        fcdp.shard(model, topology, units=[*model.layers], **arguments)
    assert not fcdp.is_cached(model)
    if words == "has no subclass":
        return  # some modules are sharded, as the error says
    if words == "lists no parameters":
        model.layers[3] = nn.Sequential(*model.layers[3])
        fcdp.shard(model, topology)
    else:
        fcdp.cache_parameters(model, topology)
    model(torch.ones(1, 4)).sum().backward()


class OwnGather:
    """A custom collective, which nobody calls."""


@pytest.mark.parametrize("words", ["has a custom collective", "gathers parameters of"])
@on_ranks(2)
def test_a_unit_that_one_rank_alone_refuses_is_refused_on_all(words: str) -> None:
    topology, model = topology_of(2, 1), Net()
    last: Any = model.layers[3]
    if topology.rank == 1 and words == "gathers parameters of":
        last[0].bias = nn.Parameter(last[0].bias.double())
    for module in [*model.layers, model]:
        fully_shard(module, mesh=topology.mesh)
    if topology.rank == 1 and words == "has a custom collective":
        last.set_custom_all_gather(OwnGather())
    begin = "layers.3" if topology.rank == 1 else "model: rank 1: .*layers.3"
    with pytest.raises(ValueError, match=f"{begin}:? {words}"):
        comm = fcdp.CommOptions(gather_codec=fcdp.BlockInt8())
        fcdp.cache_parameters(model, topology, comm=comm)
    assert not fcdp.is_cached(model)


def fewer(model: Net) -> list[nn.Module]:
    return [*model.layers[:2], model]


def packs(model: Net) -> list[nn.Module]:
    packed(model)
    return [*model.layers, model]


@on_ranks(2)
def test_ranks_that_fully_shard_has_sharded_unlike_are_refused_on_all() -> None:
    topology = topology_of(2, 1)
    unlike = "units: differs between ranks"
    cases: list[tuple[Callable[[Net], list[nn.Module]], str]] = [
        (fewer, unlike),
        (packs, unlike),
        (lambda model: [], "model: no module is sharded by FSDP2"),
    ]
    for units, words in cases:
        model = Net()
        model.layers[3].requires_grad_(False)
        for unit in units(model) if topology.rank == 1 else [*model.layers, model]:
            fully_shard(unit, mesh=topology.mesh)
        with pytest.raises(ValueError, match=words):
            fcdp.cache_parameters(model, topology)
        assert not fcdp.is_cached(model)


@on_ranks(2)
def test_ranks_may_differ_in_what_is_ignored() -> None:
    topology = topology_of(2, 1)
    model, own = Net(), nn.Linear(4, 3 + topology.rank)
    model.own = own
    fcdp.shard(model, topology, ignored_params=[*own.parameters()])
    (own.weight.sum() + model(torch.ones(1, 4)).sum()).backward()
    assert own.weight.grad is not None
    assert own.weight.grad.shape == (3 + topology.rank, 4)
    assert fcdp.is_cached(model)


@on_ranks(2)
def test_what_is_inside_of_another_unit_may_come_after_it() -> None:
    model: Any = Net()
    units = [model.layers[0], model.layers[0][0], *model.layers[1:]]
    fcdp.shard(model, topology_of(2, 1), units=units)
    model(torch.ones(1, 4)).sum().backward()
    assert [unit.name for unit in engine_of(model).units][:2] == ["root", "layers.0.0"]


LISTS: dict[str, tuple[Callable[[], Net], Callable[[Any], list[Any]]]] = {
    "two blocks": (BLOCKS, lambda m: [[m.layers[0], m.layers[2]], m.layers[1], m.layers[3]]),
    "a block and the head": (HEAD, lambda m: [m.layers[0], (m.layers[1], m.head), m.layers[3]]),
    "one module in two": (shared, lambda m: [m.layers[0], [m.layers[1], m.layers[3]]]),
    "nothing tied": (Net, lambda m: [[m.layers[0], m.layers[1]], [m.layers[2], m.layers[3]]]),
}


@pytest.mark.parametrize("case", LISTS)
@pytest.mark.parametrize("trained", ["", "bias", "2.0"])
@on_ranks(2)
def test_a_list_is_one_unit(case: str, trained: str) -> None:
    topology, (make, units) = topology_of(2, 1), LISTS[case]
    losses: dict[str, list[float]] = {}
    for how in ("fsdp2", "shard", "undetected", "cache_parameters"):
        model = make()
        for name, param in model.named_parameters():
            param.requires_grad_(trained in name)
        listed = units(model)
        if how in ("shard", "undetected"):
            fcdp.shard(
                model, topology, units=listed, cache=fcdp.CacheOptions(detect_writes=how == "shard")
            )
            assert len(engine_of(model).units) <= (len(listed) + 1) * (2 if trained else 1)
        else:
            for unit in [*listed, model]:
                fully_shard([*unit] if isinstance(unit, tuple) else unit, mesh=topology.mesh)
            if how == "cache_parameters":
                fcdp.cache_parameters(model, topology)
        optimizer = torch.optim.SGD(
            [param for param in model.parameters() if param.requires_grad], lr=0.5
        )
        losses[how] = []
        for step in range(3):
            loss = model(torch.full((2, 4), 0.3 * (step + topology.rank))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[how].append(float(loss.detach()))
    assert len(set(losses["fsdp2"])) == 3
    assert all(each == losses["fsdp2"] for each in losses.values()), losses
