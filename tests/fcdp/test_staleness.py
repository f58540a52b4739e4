"""Causes of stale entries, ranks that decide alike, and writes as one rank sees them."""

import functools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn

import fcdp
from fcdp.cache.cache import Entry
from fcdp.engine import engine_of
from fcdp.exchange import any_rank
from fcdp.guard import Guard
from fcdp.pass_controller import PassController
from fcdp.staleness import Staleness, contents
from fcdp.streams import Slices
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit
from tests.fcdp.training import WIDTH, Run, Settings, loss_of
from tests.ranks import Pools, on_ranks

# The adapters of each block have a unit of their own.
SETTINGS = Settings(2, 1, adapter_rank=3, reshard_after_forward=True)
PLAIN = Settings(2, 1)


ADAPTERS = ["blocks.0.first.down", "blocks.1.first.down"]


def step_of_first_adapters(run: Run) -> None:
    """Step by fused kernels, which leave the version counters as they are."""
    torch.optim.AdamW(list(run.model.blocks[0].first.parameters()), fused=True).step()  # type: ignore[union-attr]


def write_on_rank_1(run: Run) -> None:
    if run.topology.rank == 1:
        run.model.blocks[1].up.weight.mul_(2)


def local_write_on_rank_1(run: Run) -> None:
    if run.topology.rank == 1:
        run.model.blocks[1].up.weight.to_local().mul_(2)  # type: ignore[operator]


def write_into_a_state_dict_on_rank_1(run: Run) -> None:
    """Write as torch.distributed.checkpoint loads: to an alias, where no version grows."""
    state = run.model.state_dict()
    if run.topology.rank == 1:
        state["blocks.1.up.weight"].detach().to_local().mul_(2)  # type: ignore[operator]


def load_of_a_layer(run: Run) -> None:
    layer = run.model.blocks[1].up
    layer.load_state_dict(layer.state_dict())


def load_through_data(run: Run) -> None:
    """Load by modules' own methods, as quantised ones do: another value of one, and no trace."""

    def load(*_: object) -> None:
        run.model.blocks[1].up.weight.data.to_local()[0, 0] += 1  # type: ignore[operator,union-attr]

    for module in run.model.modules():
        module._load_from_state_dict = lambda *_: None  # type: ignore[method-assign]
    run.model.blocks[1].up._load_from_state_dict = load  # type: ignore[method-assign,union-attr]
    run.model.load_state_dict(run.model.state_dict())


def assign(run: Run) -> None:
    """Put new tensors of the same values in place of all parameters."""
    state = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def data_write(run: Run) -> None:
    for param in run.model.parameters():
        param.data.mul_(2)
    fcdp.invalidate(run.model)


Event = Callable[[Run], object]
#: Events before the first of two forwards and between them, and the units that the second
#: gathers anew on both ranks; ``None``: all of them.
EVENTS: list[tuple[Event | None, Event, list[str] | None]] = [
    (None, lambda run: None, []),
    (None, lambda run: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step(), []),
    (None, lambda run: run.model.state_dict(), []),
    (None, lambda run: run.optimizer.step(), ADAPTERS),
    (None, step_of_first_adapters, ADAPTERS[:1]),
    (assign, lambda run: run.model.blocks[1].up.weight.mul_(2), ["blocks.1"]),
    (None, write_on_rank_1, ["blocks.1"]),
    (None, local_write_on_rank_1, ["blocks.1"]),
    (None, write_into_a_state_dict_on_rank_1, ["blocks.1"]),
    (None, lambda run: run.model.load_state_dict(run.model.state_dict()), []),
    (None, load_of_a_layer, []),
    (None, load_through_data, ["blocks.1"]),
    (assign, assign, []),
    (None, data_write, None),
]


#: Writes that are seen without a look at the contents, or because somebody holds a state dict.
SEEN = (data_write, write_into_a_state_dict_on_rank_1, load_through_data, load_of_a_layer, assign)


@on_ranks(2)
def test_what_makes_units_stale_does_on_all_ranks_and_nothing_else() -> None:
    for number, (before, between, expected) in enumerate(EVENTS):
        run = Run(replace(SETTINGS, detect_writes=between not in SEEN))
        engine, counts = engine_of(run.model), fcdp.ledger(run.model)
        if before is not None:
            before(run)
        run.loss().backward()
        generations = {unit: entry.generation for unit, entry in engine.entries.items()}
        with torch.no_grad():
            between(run)
        counts.reset()
        run.loss()
        entries = engine.entries.items()
        stale = [unit.name for unit, entry in entries if entry.generation > generations[unit]]
        names = [unit.name for unit in engine.units]
        assert stale == (names if expected is None else expected), (number, stale)
        assert counts.misses == len(stale), number


@pytest.mark.parametrize("by_optimizer", [True, False])
@on_ranks(4)
def test_what_stays_gathered_is_gathered_anew_after_a_pass_without_gradients(
    by_optimizer: bool,
) -> None:
    """Small adapters do. No backward lets go of them, and what is gathered is not looked at."""
    run = Run(Settings(2, 2, adapter_rank=1))
    model = run.model
    assert engine_of(model).controller.not_resharded, "FCDP chose to keep them gathered"
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    x = torch.ones(2, WIDTH)
    run.loss().backward()
    with torch.no_grad():
        before = model.blocks[0](x)
        if by_optimizer:
            optimizer.step()
        else:
            for param in trained:
                param.mul_(1.5)
        seen = model.blocks[0](x)
        fcdp.invalidate(model)
        engine_of(model).controller.not_resharded[0].module.reshard()
        expected = model.blocks[0](x)
    assert not torch.equal(before, expected)
    assert torch.equal(seen, expected)


@on_ranks(2)
def test_what_was_passed_over_and_missed_is_cached_from_then_on() -> None:
    """Nothing is kept of what a step will change; the guess that one comes is wrong here."""
    run, misses = Run(replace(PLAIN, reshard_after_forward=False)), []
    for _ in range(4):
        fcdp.ledger(run.model).reset()
        run.loss().backward()
        run.model.zero_grad()
        misses.append(fcdp.ledger(run.model).misses)
    assert misses[0] == misses[1] > 0
    assert misses[2:] == [0, 0], misses
    fcdp.invalidate(run.model)
    for expected in (misses[0], 0):
        fcdp.ledger(run.model).reset()
        run.loss().backward()
        assert fcdp.ledger(run.model).misses == expected


@on_ranks(2)
def test_what_was_cached_once_is_passed_over_where_a_step_follows() -> None:
    run = Run(replace(PLAIN, reshard_after_forward=False))
    entries = engine_of(run.model).entries.values()
    with torch.no_grad():
        run.loss()
    assert all(entry.fresh for entry in entries)
    run.step()
    run.loss()
    assert not any(entry.fresh for entry in entries)


@on_ranks(2)
def test_what_is_gathered_by_hand_is_cached_as_it_may_be_again_before_a_step() -> None:
    run = Run(PLAIN)
    run.step()
    counts = fcdp.ledger(run.model)
    counts.reset()
    for _ in range(2):
        run.model.unshard()  # the root's, of which a pass that trains keeps nothing
        run.model.reshard()
    assert (counts.misses, counts.hits) == (1, 1)


@on_ranks(2)
def test_ranks_that_run_out_of_memory_in_one_gather_agree_on_what_is_kept() -> None:
    """One before FCDP decides on it, the other after; both give the pass up, and go on."""
    run = Run(Settings(2, 1, adapter_rank=1))
    engine = engine_of(run.model)
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    (adapters,) = [unit for unit in engine.units if not unit.reuses]
    gather, plain = engine._collectives[adapters][0], Slices.take_for

    def take_for(slices: Slices, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.numel() == 2 * adapters.shard_numel:
            raise torch.OutOfMemoryError
        return plain(slices, output, *args, **kwargs)

    fails = (
        mock.patch.object(gather, "allocate", side_effect=torch.OutOfMemoryError)
        if run.topology.rank == 0
        else mock.patch.object(Slices, "take_for", take_for)
    )
    with fails, pytest.raises(torch.OutOfMemoryError):
        run.loss()
    counts = fcdp.ledger(run.model)
    for _ in range(3):  # nothing is written in between
        counts.reset()
        run.loss()
    assert (counts.hits > 0, counts.misses) == (True, 0), "what was missed is kept"


def generated(engine: str) -> tuple[list[torch.Tensor], list[int]]:
    """Losses of forwards around an optimizer step, and how often the ranks had agreed by then."""
    run = Run(PLAIN, engine)
    model, batch = run.model, next(run.data)
    loss_of(model, batch).backward()
    losses: list[torch.Tensor] = []
    times = []
    with mock.patch("fcdp.pass_controller.any_rank", wraps=any_rank) as agree:

        def forwards() -> None:
            with torch.no_grad():
                losses.extend(loss_of(model, batch) for _ in range(4))
            times.append(agree.call_count)

        with fcdp.unchanged(model) if engine == "fcdp" else nullcontext():
            forwards()
            run.optimizer.step()
            forwards()
        forwards()
    return losses, times


@on_ranks(2)
def test_under_unchanged_the_ranks_agree_once_and_a_step_is_seen() -> None:
    ours, times = generated("fcdp")
    theirs, _ = generated("fsdp2")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours[0] != ours[4]
    assert times == [1, 2, 6], "once, again after the step, and then before each forward"


def written(how: str) -> str:
    """The error of a forward under ``fcdp.unchanged``, or after it, that follows a write."""
    run = Run(PLAIN)
    model, batch = run.model, next(run.data)
    weight = model.blocks[1].down.weight

    def forwards() -> None:
        with fcdp.unchanged(model):
            loss_of(model, batch)
            weight.data.mul_(0.5) if how == "data" else weight.mul_(0.5)
            loss_of(model, batch)
        loss_of(model, batch)

    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        forwards()
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "problem"), [("data", "where nothing shows"), ("place", "in place")]
)
def test_a_write_under_unchanged_is_an_error(apart: Pools, how: str, problem: str) -> None:
    for error in apart.run(2, written, how):
        assert error.startswith(f"blocks.1: parameters were written {problem}")


class Watched(StandInUnit):
    """A frozen unit of two parameters, each its own shard."""

    trainable = False

    @property
    def held(self) -> list[torch.Tensor]:
        return [param._local_tensor.detach() for param in self.params]

    def shard(self, device: torch.device) -> torch.Tensor:
        return torch.cat([param.detach() for param in self.params])

    def stamp(self) -> int:
        return sum(param._version + param._local_tensor._version for param in self.params)


def parameter() -> nn.Parameter:
    param: Any = nn.Parameter(torch.ones(2))
    param._local_tensor = param.detach()
    return param  # type: ignore[no-any-return]


class Agreed:
    """An extension that notes what the ranks have agreed on."""

    def __init__(self, lacking: tuple[str, ...] | None, wishes: list[bool] | None) -> None:
        self._lacking, self._wishes = lacking or (), wishes
        self.wished: list[tuple[bool, ...]] = []

    def votes(self) -> list[bool]:
        return [] if self._wishes is None else [self._wishes.pop(0), True]

    def agreed(self, votes: list[bool]) -> None:
        self.wished.append(tuple(votes))

    def lacks_base(self, unit: Any) -> bool:
        return unit.name in self._lacking

    def wants(self, unit: Any) -> bool:
        return False


class Rank:
    """A rank that agrees with itself; ``asked`` has the flags of each agreement."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        detect: bool = True,
        device_type: str = "cpu",
        nodes: int = 2,
        verify: bool = False,
        lacking: tuple[str, ...] | None = None,
        without_gradients: bool = False,
        units: str = "ab",
        wishes: list[bool] | None = None,
    ) -> None:
        self.asked: list[list[bool]] = []
        monkeypatch.setattr("fcdp.pass_controller.any_rank", self._any_rank)
        topology: Any = SimpleNamespace(
            **vars(Place(nodes, 0)), mesh=SimpleNamespace(device_type=device_type)
        )
        self.units: list[Any] = [
            Watched(name, 8, params=(parameter(), parameter()), topology=topology) for name in units
        ]
        self.entries = [Entry(unit) for unit in self.units]
        self.guard: Any = Guard(self.units, STREAMS, detects=detect)
        self.staleness = Staleness(self.entries, topology, self.guard)
        self.extension = Agreed(lacking, wishes)
        asks = lacking is not None or wishes is not None
        cache: Any = mock.Mock(
            places=lambda unit: True, fallible=lambda unit: False, has_offered=lambda entry: False
        )
        monkeypatch.setattr(PassController, "_follow", lambda controller: None)
        self.controller = PassController(
            nn.Module(),
            self.entries,
            topology,
            cache=cache,
            staleness=self.staleness,
            guard=self.guard,
            in_flight=mock.Mock(),
            gathers=self.extension if asks else None,  # type: ignore[arg-type]
            reductions=None,
            look_ahead=0,
            verify=verify,
            not_resharded=[],
        )
        self.controller._without_gradients = without_gradients

    def _any_rank(self, flags: list[bool], topology: Any) -> list[bool]:
        self.asked.append([*flags])
        return [*flags]

    def gather(self, *, begins: bool = True) -> str:
        """Begin a gather; return the units that became stale by it."""
        before = [entry.generation for entry in self.entries]
        if begins:
            self.staleness.begin_pass()
        self.controller.before_gather(self.entries[0], "backward", resized=False)
        stale = [
            unit
            for unit, entry, was in zip(self.units, self.entries, before, strict=True)
            if entry.generation > was
        ]
        for unit in stale:  # which cross nodes then
            self.guard.remember(unit, unit.shard(CPU))
        return "".join(unit.name for unit in stale)

    def update(self, *params: nn.Parameter) -> torch.optim.Optimizer:
        """Announce a step of an optimizer that leaves no other trace."""
        optimizer = torch.optim.SGD(params, lr=1.0)
        self.staleness.begin_step(optimizer)
        self.staleness.end_step(optimizer)
        return optimizer


Made = Callable[..., Rank]


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Made:
    return functools.partial(Rank, monkeypatch)


def test_all_is_stale_at_first_and_then_what_was_written(rank_of: Made) -> None:
    for detect in (True, False):
        rank = rank_of(detect=detect, without_gradients=not detect)
        assert rank.gather(begins=False) == "ab"  # nobody has agreed yet
        assert rank.gather() == ""
        with torch.no_grad():
            rank.units[1].params[1].add_(1)
        assert rank.gather() == "b"
        assert rank.gather() == ""


@pytest.mark.parametrize("lacking", [None, ("b",)])
def test_a_wish_reaches_all_and_no_unit(rank_of: Made, lacking: tuple[str, ...] | None) -> None:
    rank = rank_of(wishes=[False, True, False], lacking=lacking)
    assert [rank.gather(), rank.gather(), rank.gather()] == ["ab", "", ""]
    assert rank.extension.wished == [(False, True), (True, True), (False, True)]
    assert [entry.based for entry in rank.entries] == [True, lacking is None]


def test_ranks_agree_where_a_pass_begins_or_where_they_were_asked_to(rank_of: Made) -> None:
    rank = rank_of()
    for begins, agreements in ((True, 1), (False, 1), (False, 1), (True, 2)):
        rank.gather(begins=begins)
        assert len(rank.asked) == agreements
    rank.staleness.require_agreement()
    rank.gather(begins=False)
    rank.gather(begins=False)
    assert len(rank.asked) == 3
    assert rank.asked[-1] == [False] * 4


def test_where_nothing_is_written_ranks_agree_before_the_first_pass_alone(rank_of: Made) -> None:
    rank = rank_of()

    def agreements(*, begin: bool = True) -> int:
        before = len(rank.asked)
        for _ in range(2):
            if begin:
                rank.staleness.begin_pass()
            rank.gather(begins=False)
        return len(rank.asked) - before

    assert agreements() == 2
    with rank.staleness.unchanged():
        assert agreements() == 1
        rank.staleness.require_agreement()
        assert agreements() == 1
    assert agreements(begin=False) == 1
    assert agreements() == 2


@pytest.mark.parametrize(("nodes", "verify"), [(1, False), (1, True), (2, False)])
def test_one_node_keeps_nothing_and_agrees_only_to_verify(
    nodes: int, verify: bool, rank_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(nodes=nodes, verify=verify)
    monkeypatch.setattr("fcdp.pass_controller.on_every_rank", lambda mine, topology: mine[None])
    assert rank.gather() == ("" if nodes == 1 and not verify else "ab")
    with torch.no_grad():
        rank.units[0].params[0].add_(1)
    if nodes == 1 and not verify:
        assert rank.gather(begins=False) == ""
    rank.controller.conclude()
    assert len(rank.asked) == (0 if nodes == 1 and not verify else 1) + (nodes > 1)


@pytest.mark.parametrize("detect", [True, False])
def test_an_optimizer_writes_what_has_a_gradient_or_may_have_one(
    detect: bool, rank_of: Made
) -> None:
    rank = rank_of(detect=detect, units="abc")
    rank.gather()
    (a, _), (b, _), (c, _) = (unit.params for unit in rank.units)
    b.requires_grad_(False)  # frozen after backward
    b.grad = torch.ones(2)
    c.requires_grad_(False)
    rank.update(a, b, c)
    assert rank.gather(begins=False) == "ab"
    rank.update(c)
    rank.update(parameter())
    assert len(rank.asked) == 2
    assert rank.gather(begins=False) == ""
    assert len(rank.asked) == 2  # nothing to agree on


def test_what_is_stepped_is_stale_whenever_its_closure_gathers(rank_of: Made) -> None:
    rank = rank_of()
    rank.gather()
    optimizer = torch.optim.SGD([rank.units[1].params[0]], lr=1.0)
    rank.staleness.begin_step(optimizer)
    assert [rank.gather(), rank.gather()] == ["b", "b"]
    rank.staleness.end_step(optimizer)
    assert [rank.gather(begins=False), rank.gather()] == ["b", ""]


@pytest.mark.parametrize("detect", [True, False])
def test_a_write_in_mid_pass_is_an_error_unless_it_is_declared(detect: bool, rank_of: Made) -> None:
    rank = rank_of(detect=detect)
    rank.gather()
    rank.entries[0].offered = rank.entries[0].generation  # stored: the next gather is a hit
    with torch.no_grad():
        rank.units[0].params[0].mul_(1)  # of the same values, too: contents are not looked at
    with pytest.raises(
        RuntimeError, match=r"^a: parameters were written in place.*fcdp\.invalidate"
    ):
        rank.gather(begins=False)
    rank.staleness.invalidate()
    assert rank.gather(begins=False) == "ab"
    assert rank.gather(begins=False) == ""


@pytest.mark.parametrize("detect", [True, False])
def test_what_is_replaced_in_mid_pass_is_an_error_if_a_hit_would_hold_something_else(
    detect: bool, rank_of: Made
) -> None:
    rank = rank_of(detect=detect)
    unit, entry = rank.units[0], rank.entries[0]
    unit.params[0]._local_tensor = unit.params[0].data
    unit.params[0]._local_tensor.mul_(1)  # its stamp is 1
    rank.gather()
    entry.offered = entry.generation  # stored: the next gather is a hit
    rank.staleness.replaced(unit)
    assert rank.gather(begins=False) == ""
    assert len(rank.asked) == 1, "nobody asks the other ranks"
    unit.params[0].data.add_(1)
    rank.staleness.replaced(unit)
    with pytest.raises(RuntimeError, match=r"^a: parameters were written in place"):
        rank.gather(begins=False)
    entry.offered = 0  # all ranks gather it as it is now
    assert rank.gather(begins=False) == ""


@pytest.mark.parametrize("detect", [True, False])
def test_what_is_replaced_twice_in_mid_pass_is_compared_with_what_was_gathered_between(
    detect: bool, rank_of: Made
) -> None:
    rank = rank_of(detect=detect)
    unit, entry = rank.units[0], rank.entries[0]
    rank.gather()
    unit.params[0].data.add_(1)
    rank.staleness.replaced(unit)
    assert rank.gather(begins=False) == ""  # it is stale: all ranks gather it as it is now
    rank.guard.remember(unit, unit.shard(CPU))
    entry.offered = entry.generation
    rank.staleness.replaced(unit)  # by the same values
    with mock.patch.object(rank.guard, "check", wraps=rank.guard.check) as check:
        assert [rank.gather(begins=False), rank.gather(begins=False)] == ["", ""]
    assert check.call_count == 1, "the host waits once, and not at each gather"
    assert rank.gather() == "", "it is what crossed nodes last"
    unit.params[0].data.sub_(1)
    rank.staleness.replaced(unit)
    assert rank.gather() == "a", "it is what it was before that"


@pytest.mark.parametrize("detect", [True, False])
def test_what_is_doubted_is_compared_with_what_was_gathered(detect: bool, rank_of: Made) -> None:
    rank = rank_of(detect=detect, device_type="cuda")
    rank.gather()
    with torch.no_grad():
        rank.units[0].params[0].mul_(1)  # counted, and nothing has changed
        rank.units[1].params[1].data[1] += 1  # not counted
    rank.staleness.doubt()
    assert rank.gather() == "b"
    rank.staleness.doubt()
    assert rank.gather() == ""
    with torch.no_grad():
        rank.units[0].params[0].mul_(1)
    assert rank.gather() == "a", "without doubt a count is enough, and nobody waits"
    check = mock.Mock()
    rank.guard.check = check
    rank.staleness.invalidate()
    rank.staleness.doubt()
    assert rank.gather() == "ab"
    assert not check.called, "what is written is gathered anew whatever it holds"


def trained(rank: Rank) -> Rank:
    for unit in rank.units:
        unit.trainable = True
    return rank


def test_a_trained_unit_is_compared_with_what_it_was_before_the_doubt(rank_of: Made) -> None:
    """Without ``detect_writes``, where its sum is not taken as it crosses nodes."""
    rank = trained(rank_of(detect=False))
    (a, _), (b, _) = (unit.params for unit in rank.units)
    rank.gather()
    for _ in range(2):
        rank.staleness.doubt()
        a.data.mul_(1)
        assert rank.gather() == ""
        rank.staleness.doubt()
        b.data[1] += 1
        rank.staleness.doubt()  # which does not hide the write
        assert rank.gather() == "b"
    with torch.no_grad():
        a.add_(1)
    rank.staleness.doubt()  # when it has been written
    assert rank.gather() == "a"
    rank.update(b)
    rank.staleness.doubt()
    assert rank.gather(begins=False) == "b"
    rank.staleness.loaded()  # by something that nothing has announced: who knows what it was
    assert rank.gather(begins=False) == "b"


def test_a_trained_unit_is_remembered_while_somebody_holds_its_memory(rank_of: Made) -> None:
    rank = trained(rank_of(detect=False))
    rank.gather()
    state = [unit.params[0].detach() for unit in rank.units]
    rank.staleness.hand_out(state)
    for _ in range(2):
        rank.update(rank.units[1].params[0])
        assert [rank.gather(), rank.gather()] == ["b", ""]
        state[1].add_(1)
        assert [rank.gather(), rank.gather()] == ["b", ""]
    del state
    rank.gather()
    assert not rank.guard.remembers_all


def test_what_crosses_nodes_after_somebody_was_given_its_memory_is_remembered(
    rank_of: Made,
) -> None:
    rank = trained(rank_of(detect=False))
    rank.gather()
    state = [unit.params[0].detach() for unit in rank.units]
    rank.staleness.hand_out(state)
    for unit in rank.units:
        rank.guard.remember(unit, unit.shard(CPU))
    assert rank.gather() == ""


def test_nothing_is_doubted_where_nothing_is_handed_out_or_kept(rank_of: Made) -> None:
    rank = rank_of(detect=False)
    rank.gather()
    rank.staleness.hand_out([])
    with torch.no_grad():
        rank.units[0].params[0].mul_(1)
    assert rank.gather() == "a"
    alone = rank_of(detect=False, nodes=1)
    state = [alone.units[0].params[0].detach()]
    alone.staleness.hand_out(state)
    assert not alone.guard.remembers_all
    assert not any(watched.doubted for watched in alone.staleness.watched.values())


def counted() -> nn.Parameter:
    """A parameter that has been written, with the values that it had."""
    param = parameter()
    with torch.no_grad():
        return param.mul_(1)  # type: ignore[return-value]


def test_writes_to_parameters_that_took_the_place_of_others_are_seen(rank_of: Made) -> None:
    for announce in (True, False):
        rank = rank_of(detect=False)
        rank.gather()
        unit = rank.units[0]
        unit.params = (parameter(), parameter())
        if announce:
            rank.staleness.replaced(unit, moved=False)
        assert rank.gather(begins=not announce) == ""
        with torch.no_grad():
            unit.params[1].mul_(2)
        with pytest.raises(RuntimeError, match=r"^a: parameters were written in place"):
            rank.gather(begins=False)


def test_what_is_replaced_by_the_same_values_is_not_stale(rank_of: Made) -> None:
    rank = rank_of(detect=False)
    rank.gather()
    unit = rank.units[0]
    unit.params = (counted(), parameter())  # whose stamps show a write
    rank.staleness.replaced(unit, moved=False)
    rank.staleness.replacing(unit)  # again: it is in doubt, and no stamp counts
    assert rank.gather() == ""


def test_what_is_replaced_where_it_lies_is_stale_if_it_was_before(rank_of: Made) -> None:
    rank = trained(rank_of(detect=False))
    rank.gather()
    unit = rank.units[0]

    def replace() -> None:
        rank.staleness.replacing(unit)
        unit.params = (parameter(), parameter())  # whose stamps begin anew
        rank.staleness.replaced(unit, moved=False)

    replace()
    assert rank.gather() == ""
    with torch.no_grad():
        unit.params[1].mul_(2)
    replace()
    assert rank.gather() == "a"


@pytest.mark.parametrize(
    ("detect", "device_type", "seen"),
    [(True, "cpu", "b"), (False, "cpu", ""), (True, "cuda", ""), (False, "cuda", "")],
)
def test_contents_are_compared_on_the_cpu_alone(
    detect: bool, device_type: str, seen: str, rank_of: Made
) -> None:
    rank = rank_of(detect=detect, device_type=device_type)
    rank.gather()
    rank.units[1].params[0].data.add_(1)
    assert rank.gather() == seen


@pytest.mark.parametrize(
    ("device_type", "without_gradients", "detect", "checks"),
    [
        ("cpu", True, True, 0),
        ("cuda", True, True, 1),
        ("cuda", False, True, 0),
        ("cuda", True, False, 0),
    ],
)
def test_the_guard_checks_where_contents_are_not_compared_and_no_gradients_computed(
    device_type: str, without_gradients: bool, detect: bool, checks: int, rank_of: Made
) -> None:
    """The host waits for it, as it does in no step."""
    rank = rank_of(device_type=device_type, without_gradients=without_gradients, detect=detect)
    nothing = [False] * len(rank.units)
    check = mock.Mock(return_value=(nothing, nothing))
    rank.guard.check = check
    rank.gather()
    assert check.call_count == checks


def test_and_elsewhere_while_somebody_holds_their_memory(rank_of: Made) -> None:
    rank = rank_of(detect=False)
    rank.gather()
    state = [unit.params[0].detach() for unit in rank.units]
    rank.staleness.hand_out(state)
    assert rank.gather() == ""
    rank.units[1].params[0].data.add_(1)
    rank.staleness.hand_out(state)  # which does not hide the write
    assert rank.gather() == "b"
    rank.units[0].params[0].data.add_(1)
    assert rank.gather() == "a"
    del state
    rank.gather()
    rank.units[0].params[0].data.add_(1)
    assert rank.gather() == ""


def test_what_has_no_memory_has_no_contents() -> None:
    meta = SimpleNamespace(_local_tensor=torch.empty(2, device="meta"))
    units: list[Any] = [Watched("", 8, params=params) for params in ((meta,), (meta, parameter()))]
    assert [len(contents(unit)) for unit in units] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "named"), [("e", "e:"), ("bcd", "b, c, d:"), ("abde", "a, b, d and 1 more units:")]
)
def test_stale_parameters_that_were_used_are_an_error_once(
    wrong: str, named: str, rank_of: Made
) -> None:
    rank = rank_of(units="abcde")
    rank.gather()
    for name in wrong:
        rank.guard.compare(rank.units["abcde".index(name)], torch.ones(1))
    with pytest.raises(RuntimeError, match=f"^{re.escape(named)} parameters were written"):
        rank.controller.conclude()
    assert rank.gather(begins=False) == "abcde"
    assert rank.gather() == ""


def test_the_end_of_a_run_waits_for_what_the_guard_has_not_reported_yet(rank_of: Made) -> None:
    rank = rank_of()
    landed: list[bool] = []
    rank.guard.land = lambda: landed.append(not rank.asked)
    rank.controller.conclude()
    assert landed == [True]
    unguarded = rank_of(detect=False)
    unguarded.controller.conclude()
    assert unguarded.asked == []


def test_who_cannot_tell_a_difference_says_so(rank_of: Made) -> None:
    rank = rank_of(lacking=("a",))
    rank.gather()
    assert [entry.based for entry in rank.entries] == [False, True]
    assert rank.gather() == ""
    assert rank.asked[-1] == [False, False, False, False, True, False]
    assert [entry.based for entry in rank.entries] == [False, True]


def test_generations_of_other_ranks_are_compared_to_verify(
    rank_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(verify=True)
    ahead = torch.tensor([[0, 0], [0, 1], [0, 1]])
    monkeypatch.setattr("fcdp.pass_controller.on_every_rank", lambda mine, topology: mine + ahead)
    with pytest.raises(RuntimeError, match="^b: rank 1 is at generation 3, rank 0 at 2$"):
        rank.gather()
    monkeypatch.setattr("fcdp.pass_controller.on_every_rank", lambda mine, _: mine.expand(3, 2))
    assert rank.gather() == ""
