"""What a user keeps gathered stays so: ranks may then run as many forwards as each likes."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import WIDTH, Run, Settings, loss_of, params_of
from tests.ranks import Pools


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def settings_of(adapter_rank: int, detects: bool) -> Settings:
    return Settings(2, 2, adapter_rank=adapter_rank, detect_writes=detects)


class Generating(Run):
    """A training whose ranks generate in between, each a number of tokens of its own."""

    def __init__(self, settings: Settings, engine: str, inside: str = "") -> None:
        if engine == "cache_parameters":
            super().__init__(settings, "fsdp2")
            fcdp.cache_parameters(self.model, self.topology, cache=settings.cache)
        else:
            super().__init__(settings, engine)
        self.whole: Any = self.model
        self.inside = inside if engine != "fsdp2" else ""
        self.tokens = torch.arange(8).view(1, 8).to(torch.get_default_device())

    def forwards(self, count: int) -> list[torch.Tensor]:
        unchanged = fcdp.unchanged(self.model) if self.inside == "unchanged" else None
        with unchanged or contextlib.nullcontext(), torch.no_grad():
            return [self.model(self.tokens) for _ in range(count)]

    def generate(self, how: str) -> list[torch.Tensor]:
        """Rank 0 generates fewest, rank 3 most; what is under way is waited for in a forward."""
        return self.forwards(self.topology.rank + (how == "async"))

    def keep(self, how: str) -> None:
        """Gather everything, and keep it so."""
        self.whole.set_reshard_after_forward(False)
        if how == "forward":
            self.forwards(1)
        for unit in units(self.model):
            unit.unshard(async_op=how == "async")

    def let_go(self) -> None:
        for unit in units(self.model):
            unit.reshard()
        self.whole.set_reshard_after_forward(True)


def generated(settings: Settings, engine: str, how: str, inside: str = "") -> list[Any]:
    """Logits and losses of a training in which ranks generate before each step, and after."""
    run = Generating(settings, engine, inside)
    seen: list[Any] = [run.step()]
    for step in range(3):
        run.keep(how)
        seen += run.generate(how)
        if step != 1:  # the second step begins with what is gathered
            run.let_go()
        seen.append(run.step())
        seen += run.forwards(1)
    return [*seen, *params_of(run.model).values()]


def equals_fsdp2(settings: Settings, engine: str, how: str, inside: str = "") -> None:
    theirs = generated(settings, "fsdp2", how)
    ours = generated(settings, engine, how, inside)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def on(place: str, ranks: Pools, apart: Pools) -> Pools:
    return ranks if place == "cpu" else OnStreams(apart)


@pytest.mark.parametrize(
    ("engine", "how", "inside", "detects", "adapter_rank", "place"),
    [
        ("fcdp", "unshard", "", True, 1, "cpu"),
        ("fcdp", "async", "", False, 1, "cpu"),
        ("fcdp", "forward", "unchanged", True, 1, "cpu"),
        ("fcdp", "unshard", "", True, 1, "streams"),
        ("fcdp", "async", "", True, 1, "streams"),
        ("fcdp", "forward", "", False, 1, "streams"),
        ("fcdp", "unshard", "unchanged", False, 3, "cpu"),
        ("fcdp", "async", "", True, 3, "streams"),
        ("cache_parameters", "unshard", "", True, 0, "cpu"),
        ("cache_parameters", "async", "", False, 0, "cpu"),
        ("cache_parameters", "forward", "", True, 0, "streams"),
    ],
)
def test_ranks_generate_as_under_fsdp2(
    engine: str,
    how: str,
    inside: str,
    detects: bool,
    adapter_rank: int,
    place: str,
    ranks: Pools,
    apart: Pools,
) -> None:
    settings = settings_of(adapter_rank, detects)
    on(place, ranks, apart).run(4, equals_fsdp2, settings, engine, how, inside)


def gathers_of(how: str) -> tuple[int, int, int]:
    """Gathers of a forward that needs none, of the next, and of a training step after a write."""
    run = Generating(settings_of(1, True), "fcdp")
    counts = fcdp.ledger(run.model)
    run.step()
    asked = []
    for unit in units(run.model):
        unit.unshard(async_op=how == "async")
    for _ in range(2):
        counts.reset()
        run.forwards(1)
        asked.append(counts.hits + counts.misses)
    counts.reset()
    run.step()
    return asked[0], asked[1], counts.misses


@pytest.mark.parametrize("how", ["unshard", "async"])
def test_a_forward_of_what_was_gathered_by_hand_gathers_nothing(ranks: Pools, how: str) -> None:
    """And the next one again what FSDP2 reshards, and FCDP's adapters."""
    results = ranks.run(4, gathers_of, how)
    first, second, misses = results[0]
    assert {*results} == {(0, second, misses)}
    assert second > first


def stepped(engine: str, how: str) -> list[Any]:
    """Logits around an optimizer step between two forwards of what is kept gathered."""
    run = Generating(settings_of(1, True), engine)
    run.loss().backward()
    run.keep("unshard")
    seen = run.forwards(1)
    run.optimizer.step()
    seen += run.forwards(1)
    if how == "resharded":
        for unit in units(run.model):
            unit.reshard()
    else:  # backward lets go
        run.loss().backward()
    return [*seen, *run.forwards(1)]


@pytest.mark.parametrize("how", ["resharded", "backward"])
def test_a_step_is_seen_when_what_is_kept_is_let_go(ranks: Pools, how: str) -> None:
    for (before, kept, after), (_, _, expected) in zip(
        ranks.run(4, stepped, "fcdp", how), ranks.run(4, stepped, "fsdp2", how), strict=True
    ):
        assert torch.equal(before, kept), "as FSDP2: nobody has let go of the old parameters"
        assert not torch.equal(kept, after)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


def by_a_method(engine: str) -> list[torch.Tensor]:
    run = Generating(settings_of(1, True), engine)
    run.keep("unshard")

    def generate(model: Any, count: int) -> list[torch.Tensor]:
        return [model(run.tokens) for _ in range(count)]

    type(run.model).write = generate  # type: ignore[attr-defined]
    register_fsdp_forward_method(run.model, "write")
    with torch.no_grad():
        return run.whole.write(run.topology.rank)  # type: ignore[no-any-return]


def test_a_registered_method_generates(ranks: Pools) -> None:
    ours, theirs = (ranks.run(4, by_a_method, engine) for engine in ("fcdp", "fsdp2"))
    for rank, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == rank
        assert all(map(torch.equal, mine, others))


def by_one_block(engine: str) -> list[torch.Tensor]:
    """A block that is kept gathered is called by itself, on each rank another number of times."""
    run = Generating(settings_of(1, True), engine)
    run.step()
    block, _ = run.whole.blocks
    block.set_reshard_after_forward(False)
    block.unshard()
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for _ in range(run.topology.rank + 1):
            x = block(x)
    block.reshard()
    block.set_reshard_after_forward(True)
    return [x, torch.tensor(run.step()), *run.forwards(1)]


def test_a_block_that_is_kept_is_called_by_itself(ranks: Pools) -> None:
    ours, theirs = (ranks.run(4, by_one_block, engine) for engine in ("fcdp", "fsdp2"))
    for mine, others in zip(ours, theirs, strict=True):
        for value, other in zip(mine, others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def train_after(engine: str) -> list[float]:
    """Generation as trainers switch it: kept for evaluation, resharded for training."""
    run = Generating(settings_of(1, True), engine)
    losses = []
    for _ in range(3):
        run.keep("forward")
        run.generate("forward")
        run.whole.set_reshard_after_forward(True)
        losses.append(run.step())
    losses.append(float(loss_of(run.model, next(run.data))))
    return losses


def test_training_goes_on_after_the_setting_is_taken_back(ranks: Pools) -> None:
    ours, theirs = (ranks.run(4, train_after, engine) for engine in ("fcdp", "fsdp2"))
    for mine, others in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(others, rel=1e-6)


def read_by_hand(engine: str, adapter_rank: int) -> list[Any]:
    """Values of a block that was gathered by hand, around calls of the other one."""
    run = Generating(settings_of(adapter_rank, True), engine)
    seen: list[Any] = [run.step()]
    first, second = run.whole.blocks
    x = torch.ones(2, WIDTH)

    def read() -> None:
        params = [*second.parameters()]
        assert not any(isinstance(param, DTensor) for param in params), "gathered"
        seen.extend(param.detach().clone() for param in params)

    for unit in units(run.model):
        unit.unshard()
    with torch.no_grad():
        for _ in range(3):  # the second gathers again what the first has resharded
            seen.append(first(x))
            read()
        seen.append(second(x))
    seen += [run.step(), run.step()]
    for unit in (first, second):
        unit.unshard()
    read()
    return [*seen, *run.forwards(1), run.step()]


@pytest.mark.parametrize("adapter_rank", [1, 3])
def test_what_is_gathered_by_hand_stays_so_when_others_are_called(
    ranks: Pools, adapter_rank: int
) -> None:
    ours, theirs = (
        ranks.run(4, read_by_hand, engine, adapter_rank) for engine in ("fcdp", "fsdp2")
    )
    for mine, others in zip(ours, theirs, strict=True):
        assert len(mine) == len(others)
        for value, other in zip(mine, others, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
