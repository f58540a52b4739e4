"""After `model.to`, or a load of adapters, weights cross nodes again that nobody changed.

Frozen ones in the next step, trained ones in the next micro-batch.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import (
    ENGINES,
    Adapter,
    Run,
    Settings,
    TinyLM,
    batches,
    make_model,
    make_optimizer,
    params_of,
    shard_with_fsdp2,
    topology_of,
)
from tests.ranks import Pools

#: Adapters are so small that `fcdp.shard` keeps them gathered.
LORA = Settings(2, 1, adapter_rank=1)
STEPS = 4


def cache_what_fsdp2_shards(model: TinyLM, topology: fcdp.Topology, settings: Settings) -> TinyLM:
    """Adapters have units of their own, as a user of ``fully_shard`` makes them."""
    for module in model.modules():
        if isinstance(module, Adapter):
            fully_shard(module, mesh=topology.mesh)
    shard_with_fsdp2(model, topology, settings)
    fcdp.cache_parameters(model, topology, cache=settings.cache)
    return model


class Trained(Run):
    """A training whose frozen weights half of the precision holds, too."""

    def __init__(self, settings: Settings, engine: str, directory: Path) -> None:
        self.topology, self.directory = (
            topology_of(settings.nodes, settings.ranks_per_node),
            directory,
        )
        model = make_model(settings)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.bfloat16())
        set_up = cache_what_fsdp2_shards if engine == "cache_parameters" else ENGINES[engine]
        self.model = set_up(model, self.topology, settings)
        self.optimizer = make_optimizer(self.model)
        self.data = batches(settings, self.topology.rank)

    @property
    def state(self) -> dict[str, Any]:
        return self.model.state_dict()

    @property
    def adapters(self) -> dict[str, Any]:
        trained = {name for name, param in self.model.named_parameters() if param.requires_grad}
        return {name: value for name, value in self.state.items() if name in trained}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in state.items()}


def to_where_it_is(run: Trained) -> None:
    run.model.to(torch.get_default_device())


def to_its_dtype(run: Trained) -> None:
    run.model.float()


def through_half_the_precision(run: Trained) -> None:
    """It rounds the adapters, which have been stepped and cross in any case."""
    run.model.bfloat16().float()


def move_of_a_block(run: Trained) -> None:
    run.model.blocks[1].to(torch.get_default_device())


def load_of_adapters(run: Trained) -> None:
    run.model.load_state_dict(copied(run.adapters), strict=False)


def load_of_everything(run: Trained) -> None:
    run.model.load_state_dict(copied(run.state))


def assignment(run: Trained) -> None:
    state = copied(run.state)
    frozen = {name: value for name, value in state.items() if name not in run.adapters}
    run.model.load_state_dict(frozen, strict=False, assign=True)


def distributed_load_of_adapters(run: Trained) -> None:
    """PyTorch's way: into the tensors of a state dict, without a load by the model."""
    path = run.directory / "adapters"
    state_dict_saver.save(copied(run.adapters), checkpoint_id=path)
    state_dict_loader.load(run.adapters, checkpoint_id=path)


def distributed_load_by_the_model(run: Trained) -> None:
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    state = get_model_state_dict(run.model, options=options)
    set_model_state_dict(run.model, state, options=options)


def load_of_whole_adapters(run: Trained) -> None:
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
    state = get_model_state_dict(run.model, options=options)
    set_model_state_dict(run.model, state, options=options)


def state_that_is_kept(run: Trained) -> None:
    run.kept = run.state  # type: ignore[attr-defined]


def own_checkpoint(run: Trained) -> None:
    if fcdp.is_cached(run.model):
        path = run.directory / "own"
        fcdp.save(run.model, run.optimizer, path).result()
        fcdp.load(run.model, run.optimizer, path)


Event = Callable[[Trained], None]
NOTHING_CHANGES: list[Event] = [
    to_where_it_is,
    to_its_dtype,
    through_half_the_precision,
    move_of_a_block,
    load_of_adapters,
    load_of_everything,
    assignment,
    distributed_load_of_adapters,
    distributed_load_by_the_model,
    load_of_whole_adapters,
    state_that_is_kept,
    own_checkpoint,
]


def element(tensor: Any) -> torch.Tensor:
    """The first element of this rank's part, of rank 1's alone."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.view(-1)[: int(torch.distributed.get_rank() == 1)]


def changed(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in which one element of a frozen weight is another."""
    state = copied(state)
    element(state["blocks.1.up.weight"]).add_(1)
    return state


def load_of_another_element(run: Trained) -> None:
    run.model.load_state_dict(changed(run.state))


def load_of_one_weight(run: Trained) -> None:
    state = changed(run.state)
    run.model.load_state_dict({name: state[name] for name in state if "1.up" in name}, strict=False)


def assignment_of_another_element(run: Trained) -> None:
    state = changed(run.state)
    name = "blocks.1.up.weight"
    run.model.load_state_dict({name: state[name]}, strict=False, assign=True)


def load_into_a_state_dict(run: Trained) -> None:
    element(run.state["blocks.1.up.weight"].detach()).add_(1)


def load_into_a_state_dict_that_is_kept(run: Trained) -> None:
    run.kept = getattr(run, "kept", None) or run.state  # type: ignore[attr-defined]
    element(run.kept["blocks.1.up.weight"].detach()).add_(1)  # type: ignore[attr-defined]


def rounding_of_one_element(run: Trained) -> None:
    weight = run.model.get_parameter("blocks.1.up.weight")
    with torch.no_grad():
        element(weight).add_(2**-20)
    run.model.bfloat16().float()
    with torch.no_grad():
        element(weight).add_(0.5)
    run.model.to(torch.get_default_device())


ONE_ELEMENT_CHANGES: list[Event] = [
    load_of_another_element,
    load_of_one_weight,
    assignment_of_another_element,
    load_into_a_state_dict,
    load_into_a_state_dict_that_is_kept,
    rounding_of_one_element,
]


def trained(
    settings: Settings, engine: str, event: Event | None, directory: Path
) -> tuple[list[Any], list[int]]:
    """Losses and parameters, and the bytes between nodes of steps and of an evaluation."""
    run = Trained(settings, engine, directory)
    losses, sent = [run.step()], []
    for step in range(STEPS):
        if event is not None:
            event(run)
        counts = fcdp.ledger(run.model) if engine != "fsdp2" else None
        if counts is not None:
            counts.reset()
        if step < STEPS - 1:
            losses.append(run.step())
        else:
            with torch.no_grad():
                losses.append(float(run.loss()))
        if counts is not None:
            sent.append(counts.total("inter_node"))
    return [*losses, params_of(run.model)], sent


def in_micro_batches(
    settings: Settings, engine: str, event: Event | None, directory: Path
) -> tuple[list[Any], list[int]]:
    """The same of steps of three micro-batches, and the bytes of those after the event."""
    run = Trained(settings, engine, directory)
    losses, sent = [], []
    for _ in range(STEPS):
        for micro_batch in range(3):
            if micro_batch == 1 and event is not None:
                event(run)
            if micro_batch == 1 and engine != "fsdp2":
                fcdp.ledger(run.model).reset()
            loss = run.loss()
            loss.backward()
            losses.append(float(loss.detach()))
        if engine != "fsdp2":
            sent.append(fcdp.ledger(run.model).total("inter_node"))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return [*losses, params_of(run.model)], sent


Training = Callable[[Settings, str, Event | None, Path], tuple[list[Any], list[int]]]


#: Bytes of each step of trainings without an event, by what they depend on: many events share one.
_UNDISTURBED: dict[tuple[object, ...], list[int]] = {}


def sent_undisturbed(settings: Settings, engine: str, train: Training) -> list[int]:
    key = repr(settings), engine, train, torch.distributed.get_rank()
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = train(settings, engine, None, Path())[1]
    return _UNDISTURBED[key]


def same(
    settings: Settings, engine: str, event: Event, directory: Path, train: Training
) -> tuple[Any, Any]:
    """Compare with FSDP2; return the bytes of each step, and of undisturbed ones."""
    (*losses, params), _ = train(settings, "fsdp2", event, directory)
    (*ours, our_params), sent = train(settings, engine, event, directory)
    assert ours == losses, (ours, losses)
    for name, param in params.items():
        assert torch.equal(our_params[name], param), name
    return sent, sent_undisturbed(settings, engine, train)


def nothing_crosses(
    settings: Settings, engine: str, event: Event, directory: Path, train: Training = trained
) -> None:
    sent, undisturbed = same(settings, engine, event, directory, train)
    assert sent == undisturbed


def one_unit_crosses(
    settings: Settings, engine: str, event: Event, directory: Path, train: Training = trained
) -> None:
    sent, undisturbed = same(settings, engine, event, directory, train)
    more = {mine - usual for mine, usual in zip(sent, undisturbed, strict=True)}
    assert len(more) == 1
    assert min(more) > 0, "the unit of that element, once"


def rows(events: list[Event]) -> list[Any]:
    """All products on CPUs, and each event once on streams."""
    ways = [*itertools.product(("fcdp", "cache_parameters"), (True, False))]
    products = [(event, *way, "cpu") for event in events for way in ways]
    streams = [(event, *ways[at % len(ways)], "streams") for at, event in enumerate(events)]
    return [*products, *streams]


def on(place: str, ranks: Pools, apart: Pools) -> Pools:
    return ranks if place == "cpu" else OnStreams(apart)


@pytest.mark.parametrize(("event", "engine", "detects", "place"), rows(NOTHING_CHANGES))
def test_steps_after_an_event_that_changes_nothing_send_as_much_as_others(
    event: Event, engine: str, detects: bool, place: str, ranks: Pools, apart: Pools, tmp_path: Path
) -> None:
    settings = replace(LORA, detect_writes=detects)
    on(place, ranks, apart).run(2, nothing_crosses, settings, engine, event, tmp_path)


@pytest.mark.parametrize(("event", "engine", "detects", "place"), rows(ONE_ELEMENT_CHANGES))
def test_one_element_that_one_rank_changes_is_seen_by_all(
    event: Event, engine: str, detects: bool, place: str, ranks: Pools, apart: Pools, tmp_path: Path
) -> None:
    settings = replace(LORA, detect_writes=detects)
    on(place, ranks, apart).run(2, one_unit_crosses, settings, engine, event, tmp_path)


def state_dict(run: Trained) -> None:
    assert run.state


def load_through_the_modules(run: Trained) -> None:
    for block in run.model.blocks:
        block.load_state_dict(copied(block.state_dict()))


def trained_weight(run: Trained) -> str:
    return next(name for name in run.adapters if re.match(r"blocks\.1\..*up\.weight", name))


def load_of_another_adapter(run: Trained) -> None:
    state = copied(run.adapters)
    element(state[trained_weight(run)]).add_(1)
    run.model.load_state_dict(state, strict=False)


def adapter_in_a_state_dict(run: Trained) -> None:
    element(run.state[trained_weight(run)].detach()).add_(1)


def adapter_and_then_to(run: Trained) -> None:
    """The count of writes is gone when the ranks agree, and begins anew."""
    param = run.model.get_parameter(trained_weight(run))
    with torch.no_grad():
        element(param).add_(1)
        param.add_(1)
    run.model.to(torch.get_default_device())


def to_and_then_adapter(run: Trained) -> None:
    run.model.to(torch.get_default_device())
    with torch.no_grad():
        element(run.model.get_parameter(trained_weight(run))).add_(1)


BETWEEN: list[tuple[Callable[..., None], Event]] = [
    *(
        (nothing_crosses, event)
        for event in (
            to_where_it_is,
            state_dict,
            load_of_adapters,
            state_that_is_kept,
            load_through_the_modules,
            move_of_a_block,
            load_of_everything,
            distributed_load_of_adapters,
        )
    ),
    (one_unit_crosses, load_of_another_adapter),
    (one_unit_crosses, adapter_in_a_state_dict),
    (one_unit_crosses, adapter_and_then_to),
    (one_unit_crosses, to_and_then_adapter),
]
OWN_UNITS = replace(LORA, adapter_rank=3, reshard_after_forward=True)
WAYS_BETWEEN = [
    (LORA, "fcdp", False, "cpu"),
    (OWN_UNITS, "fcdp", False, "streams"),
    (LORA, "cache_parameters", False, "cpu"),
    (Settings(2, 1), "fcdp", False, "cpu"),
    (OWN_UNITS, "fcdp", True, "cpu"),
]


@pytest.mark.parametrize(
    ("check", "event", "settings", "engine", "detects", "place"),
    [(*case, *way) for case in BETWEEN for way in WAYS_BETWEEN],
)
def test_micro_batches_after_an_event_send_what_has_changed(
    check: Callable[..., None],
    event: Event,
    settings: Settings,
    engine: str,
    detects: bool,
    place: str,
    ranks: Pools,
    apart: Pools,
    tmp_path: Path,
) -> None:
    settings = replace(settings, detect_writes=detects)
    pools = on(place, ranks, apart)
    pools.run(2, check, settings, engine, event, tmp_path, in_micro_batches)
