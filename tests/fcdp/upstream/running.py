"""Runs one case twice on the same ranks, with and without FCDP, and compares what it saw."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import VOCABULARY
from tests.ranks import Pools

M = TypeVar("M", bound=nn.Module)

#: Nodes × ranks per node. Two summands have one order; the second shape has a hierarchy.
PAIR = (2, 1)
SHAPES = [PAIR, (2, 2)]
EXACT = {"rtol": 0.0, "atol": 0.0}
#: Variants of a case that one test runs; of more, the first has a test of its own.
MANY = 7
#: Between sums in another order: in float64, so that what is stale or misplaced stands out.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@dataclass
class Run:
    """One run of a case: what it is given, and what it saw."""

    topology: fcdp.Topology
    cached: bool
    #: Options of what crosses nodes, in the run that has FCDP.
    comm: fcdp.CommOptions = field(default_factory=fcdp.CommOptions)
    seen: list[tuple[str, Any]] = field(default_factory=list)
    _models: list[nn.Module] = field(default_factory=list)

    def shard(self, units: Sequence[nn.Module | list[nn.Module]], **options: Any) -> None:
        """Call ``fully_shard`` on each of ``units`` in turn."""
        for unit in units:
            fully_shard(unit, mesh=self.topology.mesh, **options)

    def cache(self, model: nn.Module, **options: Any) -> None:
        """Turn FCDP on, in the run that has it; call it after the last ``fully_shard``."""
        if self.cached:
            fcdp.cache_parameters(model, self.topology, **{"comm": self.comm, **options})
            self._models.append(model)

    def set_up(
        self, model: M, units: Sequence[nn.Module | list[nn.Module]] | None = None, **options: Any
    ) -> M:
        """Shard ``units``, or the model's own or its parts and then itself, and turn FCDP on."""
        find_units: Any = getattr(model, "units", lambda: [*model.children(), model])
        self.shard(find_units() if units is None else units, **options)
        self.cache(model)
        return model

    def see(self, label: str, value: Any) -> None:
        """Keep a copy of ``value``; of what is sharded, this rank's part."""
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        self.seen.append((label, value))

    def see_params(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.see(name, param)

    def see_gradients(self, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            self.see(f"{name}.grad", param.grad)

    def settle(self) -> None:
        """Wait for the device, as a reader of unfinished results must."""
        torch.get_device_module(torch.get_default_device()).synchronize()

    def input(self, *shape: int, step: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers that differ from rank to rank, and not from run to run."""
        generator = torch.Generator().manual_seed(1000 * step + self.topology.rank)
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def tokens(self, high: int, *shape: int, step: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.topology.rank)
        return torch.randint(high, shape, generator=generator)

    def check_gathers(self) -> None:
        """FCDP gathered every model that it was given."""
        for model in self._models:
            assert fcdp.ledger(model).misses > 0, "nothing went through FCDP"


Case = Callable[..., None]


def cases(
    *variants: tuple[Any, ...], shapes: Sequence[tuple[int, int]] = SHAPES
) -> Callable[[Case], Case]:
    """Make a test of ``case(run, *variant)``: it must see the same with FCDP as without.

    All variants run on the first shape, in one call, or where there are many the first in one, and
    the others in a row of their own, which is drawn; the first of them in CI on the other shapes.
    """
    first, *others = shapes
    many = len(variants) > MANY

    def decorate(case: Case) -> Case:
        @pytest.mark.parametrize(
            ("shape", "rest"),
            [
                pytest.param(first, False, id=pytest.HIDDEN_PARAM),
                *([pytest.param(first, True, id="other variants")] if many else []),
                *(
                    pytest.param(shape, False, id=str(shape), marks=pytest.mark.system)
                    for shape in others
                ),
            ],
        )
        def test(ranks: Pools, shape: tuple[int, int], rest: bool) -> None:
            some = variants or ((),)
            if rest:
                some = some[1:]
            elif many or shape != first or ranks.samples:
                some = some[:1]
            ranks.run(math.prod(shape), sees_the_same, *shape, case.__module__, case.__name__, some)

        test.__name__, test.__doc__, test.__module__ = case.__name__, case.__doc__, case.__module__
        test.case = case  # type: ignore[attr-defined]
        return test

    return decorate


def sees_the_same(
    nodes: int, ranks_per_node: int, module: str, name: str, variants: Sequence[tuple[Any, ...]]
) -> None:
    """Fail where a case, found by its test's name, sees something else with FCDP than without."""
    case, topology = getattr(import_module(module), name).case, topology_of(nodes, ranks_per_node)
    problems = [f"{each}: {text}" for each in variants for text in both(topology, case, each)]
    assert not problems, "\n".join(problems)


def both(topology: fcdp.Topology, case: Case, args: Sequence[Any]) -> list[str]:
    """Run ``case`` without and with FCDP; return where the two differ."""
    plain, cached = Run(topology, cached=False), Run(topology, cached=True)
    # Two summands have one order; with more, gloo's ring and the hierarchy differ.
    dtype, tolerance = (
        (torch.float32, EXACT) if topology.world_size <= 2 else (torch.float64, CLOSE)
    )
    with default_dtype(dtype):
        case(plain, *args)
        assert plain.seen, "the case looked at nothing"
        case(cached, *args)
        cached.check_gathers()
    return differences(plain.seen, cached.seen, tolerance)


#: The default before, once per rank of this process that has another.
_before: list[torch.dtype] = []


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Ranks that are threads share the default: the last that leaves restores it."""
    _before.append(_before[0] if _before else torch.get_default_dtype())
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        before = _before.pop()
        if not _before:
            torch.set_default_dtype(before)


def differences(
    expected: Sequence[tuple[str, Any]],
    actual: Sequence[tuple[str, Any]],
    tolerance: dict[str, float],
) -> list[str]:
    if [label for label, _ in expected] != [label for label, _ in actual]:
        return [f"saw {actual}, expected {expected}"]
    problems = []
    for (label, theirs), (_, ours) in zip(expected, actual, strict=True):
        try:
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours, theirs, **tolerance, equal_nan=True)
            else:
                assert ours == theirs, f"{ours!r} is not {theirs!r}"
        except AssertionError as error:
            problems.append(f"{label}: {error}")
    return problems


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], torch.Tensor],
    *,
    steps: int = 4,
) -> None:
    """Train as upstream's cases do, gradients cleared to None and to zero in turn."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        value = loss(step)
        losses.append(float(value.detach()))
        run.see(f"loss {step}", value)
        value.backward()
        run.see_gradients(model)
        optimizer.step()
    assert len(set(losses)) == steps, "the case does not train"
    run.see_params(model)


def train_on(run: Run, model: nn.Module, *shape: int) -> None:
    train(run, model, adam(model), lambda step: model(run.input(*shape, step=step)).sum())


def train_on_tokens(run: Run, model: nn.Module, *, steps: int = 4) -> None:
    def loss(step: int) -> torch.Tensor:
        return model(run.tokens(VOCABULARY, 2, 8, step=step)).square().mean()

    train(run, model, adam(model), loss, steps=steps)


def steps(run: Run, model: nn.Module, number: int = 3) -> Iterator[int]:
    """Steps by number: the gradients that each has computed are seen, stepped and cleared."""
    optimizer = adam(model)
    for step in range(number):
        yield step
        run.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    run.see_params(model)


def adam(model: nn.Module) -> torch.optim.Adam:
    """A large epsilon: rounding in tiny gradients must not become whole steps.

    Fused, a step is one operation on DTensors, each of which costs far more than it computes here.
    """
    fused = next(model.parameters()).device.type == "cpu"
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3, fused=fused)


def all_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())
