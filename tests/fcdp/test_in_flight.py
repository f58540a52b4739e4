"""Reductions in flight: on exchanges that only note what is asked of them, and in training.

Gathers on the CPU are interrupted here too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from fcdp.all_gather import Gathering
from fcdp.engine import engine_of
from fcdp.exchange import Pending, Then
from fcdp.failure import RankFailed
from fcdp.in_flight import MOST_IN_FLIGHT, Arriving, Crossing, InFlight
from tests.fcdp.stand_ins import NoFailures, StandInUnit, Uncounted
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.test_hooks import before_each_backward
from tests.ranks import Pools

SUMS = (2.0, 4.0, 6.0, 8.0)


@torch.enable_grad()
def in_backward(*steps: Callable[[], object]) -> None:
    """Run ``steps`` one after another in one backward."""
    y = x = torch.ones(1, requires_grad=True)

    def hook(step: Callable[[], object]) -> Callable[[torch.Tensor], None]:
        def run(gradient: torch.Tensor) -> None:
            step()

        return run

    for step in reversed(steps):
        y = y * 1
        y.register_hook(hook(step))
    y.sum().backward()
    assert x.grad is not None, "backward has ended"


class Exchanges:
    """Reductions whose sums arrive when they are waited for, and the log of what happened."""

    def __init__(self) -> None:
        failures: Any = NoFailures()
        self.queue = InFlight(failures)
        self.log: list[str] = []

    def output(self, name: str) -> Arriving:
        """Return the output that FSDP2 is given for the gradients (4) of unit ``name``."""
        unit: Any = StandInUnit(name, 16)
        return Arriving(torch.full((4,), torch.nan), Crossing(unit, self.queue), whole=True)

    def started(self, name: str) -> Arriving:
        self.start(output := self.output(name))
        return output

    def start(self, output: Arriving, error: BaseException | None = None) -> None:
        """Start the reduction to ``output``; its wait raises ``error``, if given."""
        name = output.crossing.unit.name

        def arrive() -> None:
            self.log.append(f"wait {name}")
            if error is not None:
                raise error
            output.plain.copy_(torch.tensor(SUMS))

        def issue() -> list[Pending]:
            self.log.append(f"start {name}")
            return [Then(arrive)]

        self.queue.start(output.crossing, issue)


def test_reductions_start_in_order_and_at_most_so_many_are_in_flight() -> None:
    exchanges = Exchanges()
    in_backward(*(lambda name=name: exchanges.started(name) for name in "abcd"))
    starts = ["start a", "start b", "wait a", "start c", "wait b", "start d"]
    assert MOST_IN_FLIGHT == 2
    assert exchanges.log == [*starts, "wait c", "wait d"]


READS: dict[str, Callable[[torch.Tensor], list[float]]] = {
    "tolist": lambda gradient: gradient.tolist(),
    "numpy": lambda gradient: gradient.numpy().tolist(),
    "clone": lambda gradient: gradient.clone().tolist(),
    "cast": lambda gradient: gradient.to(torch.float64).tolist(),
    "view": lambda gradient: gradient.view(2, 2).flatten().tolist(),
    "item": lambda gradient: [part.item() for part in gradient],
    "added up": lambda gradient: torch.zeros(4).add_(gradient).tolist(),
    "added to": lambda gradient: gradient.add_(torch.zeros(4)).tolist(),
    "foreach": lambda gradient: torch._foreach_add([gradient], 0.0)[0].tolist(),
    "divided by a tensor": lambda gradient: gradient.div_(torch.tensor(1.0)).tolist(),
    "repr": lambda gradient: eval(repr(gradient), {"tensor": lambda values: values}),
}


@pytest.mark.parametrize("read", READS)
def test_whatever_reads_a_gradient_waits_for_it(read: str) -> None:
    exchanges = Exchanges()
    seen: list[list[float]] = []

    @torch.no_grad()
    def look() -> None:
        output = exchanges.started("a")
        seen.append(READS[read](torch.as_strided(output, (4,), (1,), 0)))
        exchanges.log.append("read")

    in_backward(look)
    assert seen == [[*SUMS]]
    assert exchanges.log == ["start a", "wait a", "read"]


def test_a_cast_to_another_dtype_follows_the_exchange() -> None:
    """FSDP2 casts from the dtype of reductions to that of parameters."""
    exchanges = Exchanges()
    seen: list[torch.Tensor] = []

    @torch.no_grad()
    def divide_and_cast() -> None:
        output = exchanges.started("a")
        output.div_(2.0)
        cast = torch.as_strided(output.to(torch.float64), (2,), (1,), 2)
        assert cast.dtype == torch.float64
        exchanges.log.append("cast")
        seen.append(cast)

    in_backward(divide_and_cast)
    assert exchanges.log == ["start a", "cast", "wait a"]
    assert seen[0].tolist() == [3.0, 4.0]


def test_a_hook_that_casts_a_gradient_has_a_plain_tensor() -> None:
    """Nothing would make it one later, and it could be neither copied deeply nor saved."""
    exchanges = Exchanges()
    cast: list[torch.Tensor] = []

    @torch.no_grad()
    def hook() -> None:
        cast.append(torch.as_strided(exchanges.started("a"), (4,), (1,), 0).to(torch.float64))

    in_backward(hook)
    assert type(cast[0]) is torch.Tensor
    assert cast[0].tolist() == [*SUMS]


def test_those_before_the_one_that_is_read_end_first_and_later_ones_do_not() -> None:
    exchanges = Exchanges()
    outputs = [exchanges.output(name) for name in ("a", "b")]
    in_backward(
        *(lambda output=output: exchanges.start(output) for output in outputs),
        lambda: outputs[0].sum(),
        lambda: exchanges.log.append("read a"),
        lambda: exchanges.started("c"),
        lambda: outputs[1].sum(),
        lambda: exchanges.log.append("read b"),
    )
    before = ["start a", "start b", "wait a", "read a"]
    assert exchanges.log == [*before, "start c", "wait b", "read b", "wait c"]


def test_a_reduction_outside_of_backward_is_waited_for_at_once() -> None:
    exchanges = Exchanges()
    exchanges.started("a")
    assert exchanges.log == ["start a", "wait a"]


def test_every_backward_waits_for_its_own() -> None:
    """So does one inside another, as in reentrant checkpointing, and one after a failed one."""
    exchanges = Exchanges()

    def step(name: str) -> Callable[[], object]:
        return lambda: exchanges.started(name)

    in_backward(step("a"), lambda: in_backward(step("b")), step("c"))
    inner = ["start a", "start b", "wait a", "wait b"]
    assert exchanges.log == [*inner, "start c", "wait c"]
    exchanges.log.clear()

    def fail() -> None:
        raise ValueError("no label")

    with pytest.raises(ValueError, match="no label"):
        in_backward(step("d"), fail)
    assert exchanges.log == ["start d"]
    in_backward(step("e"))
    assert exchanges.log == ["start d", "start e", "wait d", "wait e"]


def test_a_gradient_whose_wait_was_interrupted_is_never_read() -> None:
    """The queue goes on, and memory that gloo may still write to lives until it does not."""
    exchanges = Exchanges()
    lost, next_one = exchanges.output("blocks.1"), exchanges.output("blocks.0")

    def interrupted() -> None:
        exchanges.start(lost, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            lost.sum()
        assert exchanges.queue._interrupted

    in_backward(interrupted)
    for read in (lost.sum, lambda: torch.as_strided(lost, (1,), (1,), 0)):
        with pytest.raises(RuntimeError, match=r"blocks\.1: its gradients did not arrive"):
            read()
    in_backward(lambda: exchanges.start(next_one))
    assert next_one.tolist() == [*SUMS]
    assert exchanges.log == ["start blocks.1", "wait blocks.1", "start blocks.0", "wait blocks.0"]
    assert not exchanges.queue._interrupted


def test_a_gradient_that_a_failed_rank_keeps_from_arriving_is_never_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is waited for where nothing can be exchanged any more."""

    def over(self: NoFailures) -> None:
        raise RankFailed("rank 1 failed: ValueError: no label")

    exchanges = Exchanges()
    outputs = [exchanges.output(name) for name in ("blocks.1", "blocks.0")]

    def fail() -> None:
        for output in outputs:
            exchanges.start(output)
        monkeypatch.setattr(NoFailures, "completing", over)

    with pytest.raises(RankFailed, match="no label"):
        in_backward(fail)
    for output in outputs:
        with pytest.raises(RuntimeError, match="no label|did not arrive"):
            output.sum()
    assert exchanges.log == ["start blocks.1", "start blocks.0"]


def flying(nodes: int, ranks_per_node: int, dtype: torch.dtype) -> tuple[list[str], set[type]]:
    """Reductions in flight when each block's backward begins, and after it; types of gradients."""
    model, topology = mlps(5, 6), topology_of(nodes, ranks_per_node)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    fcdp.shard(model, topology, units=model, mp_policy=policy)
    seen: list[str] = []

    def look() -> None:
        crossings = engine_of(model)._in_flight._crossings
        seen.append("".join(crossing.unit.name for crossing in crossings))

    before_each_backward(model, look)
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    look()
    gradients: list[Any] = [param.grad for param in model.parameters()]
    return seen, {type(gradient._local_tensor) for gradient in gradients}


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 2), torch.float32), ((3, 1), torch.bfloat16)], ids=str
)
def test_two_reductions_are_in_flight_and_none_after_backward(
    ranks: Pools, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """This holds too where FSDP2 casts the reduced gradients to the parameters' dtype."""
    for seen, types in ranks.run(shape[0] * shape[1], flying, *shape, dtype):
        assert seen == ["", "4", "43", "32", "21", ""]
        assert types == {torch.Tensor}


class Message:
    """Arrives once; to wait for it again would take for ever."""

    def __init__(self, interrupted: BaseException | None = None) -> None:
        self.waited = 0
        self._interrupted = interrupted

    def wait(self) -> None:
        self.waited += 1
        assert self.waited == 1
        if self._interrupted is not None:
            raise self._interrupted


@pytest.mark.parametrize("where", ["in the wait", "between two exchanges"])
def test_what_was_interrupted_is_not_waited_for_again(where: str) -> None:
    """Python delivers Ctrl-C as a wait returns, and FSDP2 waits again for what it holds."""
    error = KeyboardInterrupt()
    messages = [Message(error if where == "in the wait" else None), Message()]
    forgotten: list[None] = []

    def go_on() -> Sequence[Any]:
        if where == "between two exchanges":
            raise error
        return messages[1:]

    exchanges: Any = Uncounted()
    gathering = Gathering(
        messages[:1], go_on, exchanges=exchanges, forget=lambda: forgotten.append(None)
    )
    with pytest.raises(KeyboardInterrupt):
        gathering.wait()
    assert len(forgotten) == 1, "FSDP2 gathers anew what this gather has not brought"
    assert gathering.wait()
    assert [message.waited for message in messages] == [1, 0]
