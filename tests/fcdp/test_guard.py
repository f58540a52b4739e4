"""Writes that nothing shows: healed where they are seen before a pass, else an error soon after."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from fcdp.guard import Guard
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.stand_ins import CPU, STREAMS, StandInUnit
from tests.fcdp.training import WIDTH, Block, Run, Settings, loss_of, update
from tests.ranks import Pools, on_ranks

FROZEN = Settings(2, 1, adapter_rank=3, reshard_after_forward=True)


class Event:
    """One that the host sees when told to."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Queue:
    """A stream whose copies run when the host is told that they have."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


def on_an_accelerator() -> tuple[Guard, Queue]:
    """A guard of two units, the second of which has a mismatch, and its stream of copies."""
    copies = Queue()
    streams: Any = SimpleNamespace(
        device=CPU,
        copies_out=copies,
        inter_node=Queue(),
        intra_node=None,
        current=Queue,
        on=STREAMS.on,
    )
    streams.on_host = False
    units: list[Any] = [StandInUnit(name, 8) for name in "ab"]
    guard = Guard(units, streams)
    guard._differ[1] = True
    guard._landing = SimpleNamespace(  # type: ignore[assignment]
        copy_=lambda source, non_blocking: setattr(guard, "_copied", source.tolist()),
        tolist=lambda: guard._copied,  # type: ignore[attr-defined]
    )
    return guard, copies


def test_flags_are_looked_at_when_they_have_landed() -> None:
    guard, copies = on_an_accelerator()
    assert guard.poll() == [False, False]  # the first copy is only asked for
    assert guard.poll() == [False, False]  # not landed: nobody waits, nothing is asked again
    assert [event.done for event in copies.events] == [False]
    copies.events[0].done = True
    assert guard.poll() == [False, True]
    assert [event.done for event in copies.events] == [True, False]


def test_flags_are_waited_for_where_the_device_is_more_than_a_pass_behind() -> None:
    guard, copies = on_an_accelerator()
    assert [guard.poll() for _ in range(3)] == [[False, False], [False, False], [False, True]]
    assert [event.done for event in copies.events] == [True, False]


def test_all_that_was_compared_can_be_waited_for() -> None:
    guard, copies = on_an_accelerator()
    guard.land()
    assert [event.done for event in copies.events] == [True]
    assert guard.poll() == [False, True]


@on_ranks(2)
def test_what_the_last_pass_used_is_an_error_where_the_model_is_written(tmp_path: Path) -> None:
    """Calls that write it ask the guard first, as the next pass would."""
    for write in (fcdp.save, fcdp.save_adapters, fcdp.export, fcdp.publish):
        run = Run(FROZEN)
        loss = run.loss()
        for param in run.model.blocks.parameters():
            param.data.mul_(2)
        loss.backward()
        arguments = [run.optimizer] if write is fcdp.save else []
        with pytest.raises(RuntimeError, match="written where nothing shows it"):
            write(run.model, *arguments, tmp_path)  # type: ignore[operator]
        assert [*tmp_path.iterdir()] == []


SETTINGS = Settings(adapter_rank=3)


def by_data(param: DTensor) -> None:
    param.data.mul_(0.5)


def by_collective(param: DTensor) -> None:
    """Write as a trainer that averages replicas of its own."""
    shard = param.to_local().detach()
    dist.all_reduce(shard, op=dist.ReduceOp.MAX)


WRITES: dict[str, Callable[[DTensor], None]] = {
    function.__name__: function for function in (by_data, by_collective)
}


def write(model: Any, name: str, *, alone: bool) -> None:
    """Write to the weights of the second block, which are frozen; on one rank alone if asked."""
    param = model.blocks[1].down.weight
    if not alone or name == "by_collective" or dist.get_rank() == 3:
        WRITES[name](param)


def by_unshard(block: Any) -> torch.Tensor:
    block.unshard()
    total: torch.Tensor = block.down.weight.sum()
    block.reshard()
    return total


#: Passes without gradients, of the second block or of all.
PASSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "model": loss_of,
    "block": lambda model, tokens: model.blocks[1](torch.ones(1, WIDTH)).sum(),
    "method": lambda model, tokens: model.blocks[1].part(torch.ones(1, WIDTH)).sum(),
    "unshard": lambda model, tokens: by_unshard(model.blocks[1]),
}


def evaluate_after(
    name: str, engine: str, policy: fcdp.CachePolicy, method: str, how: str
) -> list[float]:
    """Losses of a step, what evaluations around an unseen write find, and a step after it."""
    run = Run(replace(SETTINGS, policy=policy), engine)
    type(run.model.blocks[1]).part = Block.forward  # type: ignore[attr-defined]
    register_fsdp_forward_method(run.model.blocks[1], "part")
    losses = [run.step()]
    for _ in range(2):
        write(run.model, name, alone=True)
        tokens = next(run.data)
        with torch.no_grad() if method == "no_grad" else torch.inference_mode():
            losses.append(PASSES[how](run.model, tokens).item())
            if engine == "fcdp":
                fcdp.ledger(run.model).reset()
            losses.append(PASSES[how](run.model, tokens).item())
        assert engine == "fsdp2" or fcdp.ledger(run.model).misses == 0, "nothing was written"
        losses.append(run.step())
    return losses


@pytest.mark.parametrize(
    ("name", "policy", "method", "how"),
    [
        ("by_data", fcdp.HostCache(), "no_grad", "unshard"),
        ("by_collective", fcdp.HostCache(), "no_grad", "model"),
        ("by_data", fcdp.DeviceCache(), "no_grad", "block"),
        ("by_data", fcdp.HostCache(), "inference_mode", "method"),
    ],
    ids=str,
)
def test_a_pass_without_gradients_uses_what_was_written(
    streams: OnStreams, name: str, policy: fcdp.CachePolicy, method: str, how: str
) -> None:
    theirs, ours = (
        streams.run(4, evaluate_after, name, engine, policy, method, how)
        for engine in ("fsdp2", "fcdp")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
        assert len({*other}) == 5, "each write shows"


def train_after(name: str) -> tuple[int, str]:
    """Return how many training passes ran from an unseen write to the error, and its message."""
    run = Run(SETTINGS)
    for _ in range(2):
        run.step()
    write(run.model, name, alone=False)
    for passes in range(6):
        try:
            update(run.loss(), run.optimizer)
        except RuntimeError as error:
            update(run.loss(), run.optimizer)  # the guard begins anew
            return passes, str(error)
    return 6, ""


@pytest.mark.parametrize(("name", "seed"), [("by_data", 0), ("by_data", 1), ("by_collective", 0)])
def test_training_on_is_an_error_on_all_ranks_within_two_passes(
    apart: Pools, name: str, seed: int
) -> None:
    """The seed draws whether the host finds that the copy of the flags has landed."""
    outcomes = OnStreams(apart, schedules=0, seed=seed).run(4, train_after, name)
    assert len({passes for passes, _ in outcomes}) == 1
    for passes, text in outcomes:
        assert 1 <= passes <= 3  # used once or twice; the next pass, or the one after, says so
        assert "blocks.1: parameters were written where nothing shows it" in text


def drop_while_flags_are_copied() -> None:
    """Drop a model whose last pass has asked for flags; all free memory has a new owner then."""
    run = Run(SETTINGS)
    run.step()
    for _ in range(2):  # two passes, as one that finds a copy under way asks for none
        by_unshard(run.model.blocks[1])
    del run
    gc.collect()
    for owner in [torch.empty(1, dtype=torch.bool) for _ in range(500)]:
        owner.fill_(True)


def test_flags_that_are_copied_to_the_host_outlive_their_engine(streams: OnStreams) -> None:
    streams.run(4, drop_while_flags_are_copied)


def hand_out_while_a_gather_is_under_way() -> None:
    """Somebody is given the parameters while those of the next block cross nodes."""
    run = Run(Settings(detect_writes=False))
    first, second = run.model.blocks[:2]
    first.set_modules_to_forward_prefetch([second])

    def hand_out(*_: Any) -> None:
        second.state_dict()

    first.register_forward_pre_hook(hand_out)
    run.step()


def test_what_is_handed_out_is_summed_after_its_gather(streams: OnStreams) -> None:
    streams.run(4, hand_out_while_a_gather_is_under_way)


def end_with_a_hit_that_nobody_awaits() -> None:
    run = Run(SETTINGS)
    run.step()
    block: Any = run.model.blocks[1]
    block.unshard(async_op=True)
    run.step()
    for _ in range(2):  # two passes, as one that finds a copy of flags under way asks for none
        by_unshard(block)
    engine_of(run.model).controller.conclude()


def test_hits_and_flags_under_way_are_waited_for(streams: OnStreams) -> None:
    streams.run(4, end_with_a_hit_that_nobody_awaits)
