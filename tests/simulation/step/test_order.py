"""A simulated step has a real step's operations, on each stream in the same order.

The library trains a small model on the accelerator of tests/fcdp/accelerator, whose tape says what
each stream of a rank did in the step; the simulator builds the tasks of the same step. What one
operation waits for on other streams is not compared.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.all_gather import DeviceGather
from fcdp.cache.named import parse
from fcdp.cache.tiers import HostTier
from fcdp.engine import engine_of
from fcdp.exchange import ExchangeKind
from fcdp.reduce_scatter import HierarchicalReduceScatter
from simulation.hardware import cluster
from simulation.memory import place
from simulation.step.schedule import Step
from simulation.units import layout
from tests.experiments.golden import tables
from tests.fcdp.training import topology_of
from tests.ranks import Pools
from tests.simulation.cases import Case, built

#: Steps of training; the last one is compared. The first fills the caches.
STEPS = 2


class Operation(NamedTuple):
    """An operation of a step: its name on the library's tape; the simulator's stream and link."""

    taped: str
    stream: str
    link: str


#: By name, of which the first counts where several links fit; and streams by the simulator's names.
OPERATIONS = {name: Operation(*of) for name, of in tables(__file__)["operations"].items()}
STREAMS: Mapping[str, str] = tables(__file__)["streams"]
#: The library's methods that queue them, for one unit. Of those that call one another the innermost
#: counts.
METHODS: tuple[tuple[type, str, str], ...] = (
    (DeviceGather, "_queue_across", "gather across"),
    (DeviceGather, "_gather_in_node", "gather inside"),
    (HostTier, "load", "load"),
    (HostTier, "store", "store"),
    (HierarchicalReduceScatter, "_reduce_across", "reduce across"),
    (HierarchicalReduceScatter, "_reduce_in_node", "reduce inside"),
    # With flat exchanges neither of the two is called.
    (HierarchicalReduceScatter, "__call__", "reduce across"),
)
#: The unit in a task's name.
_UNIT = re.compile(r"(?:(?:forward|backward) (?:gather|store)|reduce) (.+?)(?: copy in)?$")

#: Names of operations and indices of their units, by the simulator's streams, in order.
Order = Mapping[str, list[tuple[str, int]]]


@dataclass(frozen=True)
class Training:
    """Settings that a step's order depends on."""

    case: Case
    accumulation: int = 1
    policy: str = "host"
    checkpointing: bool = False
    exchanges: ExchangeKind = "hierarchical"

    def __str__(self) -> str:
        parts = [str(self.case), f"k{self.accumulation}", self.policy]
        parts += ["checkpointing"] if self.checkpointing else []
        parts += [self.exchanges] if self.exchanges != "hierarchical" else []
        return "-".join(parts)


# By the library


def train(training: Training, begin: Callable[[list[str]], None]) -> None:
    """Take the steps on one rank. ``begin`` is called before the last, with the units' names."""
    torch.manual_seed(0)
    model: Any
    model, blocks = built(training.case)
    if training.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fcdp.shard(
        model,
        topology_of(*training.case.shape),
        units=blocks,
        policy=parse(training.policy),
        comm=fcdp.CommOptions(exchanges=training.exchanges),
    )
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for step in range(STEPS):
        if step == STEPS - 1:
            begin([unit.name for unit in engine_of(model).units])
        for index in range(training.accumulation):
            with fcdp.accumulate(model, last=index == training.accumulation - 1):
                output = model(input_ids=tokens, labels=tokens, use_cache=False)
                output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_library(training: Training) -> Order:
    """Record the last step of rank 0's streams. The process has the accelerator for good."""
    from tests.fcdp import accelerator
    from tests.fcdp.accelerator import here

    first, names = 0, list[str]()

    def begin(units: list[str]) -> None:
        nonlocal first
        if here().rank == 0:
            first, names[:] = len(here().tape.operations), units

    nodes, ranks = training.case.shape
    with labelled() as labels:
        _, tape = accelerator.run(train, nodes * ranks, training, begin)
    order = defaultdict(list)
    for taped in tape.operations[first:]:
        if taped in labels and taped.timeline.name.endswith("of rank 0"):
            operation, unit = labels[taped]
            stream = taped.timeline.name.split("'")[1]
            order[STREAMS[stream]].append((operation, names.index(unit)))
    return dict(order)


@contextmanager
def labelled() -> Iterator[Mapping[Any, tuple[str, str]]]:
    """Note the operation and the unit's name of what runs on the tape in the body.

    What the library's own methods do on the side, as the guard's checksums, is none.
    """
    from tests.fcdp.accelerator.device import Device, here

    labels: dict[Any, tuple[str, str]] = {}
    #: The calls that each rank is in, the innermost last.
    calls: Mapping[int, list[tuple[str, str]]] = defaultdict(list)

    def within(owner: type, name: str, operation: str) -> Any:
        plain = getattr(owner, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            unit = args[0] if owner is HostTier else self._unit
            calls[here().rank].append((operation, unit.name))
            try:
                return plain(self, *args, **kwargs)
            finally:
                calls[here().rank].pop()

        return mock.patch.object(owner, name, method)

    def note(self: Any, what: str, *args: Any, **kwargs: Any) -> None:
        plain_note(self, what, *args, **kwargs)
        if calls[self.rank]:
            operation, unit = calls[self.rank][-1]
            if what.startswith(OPERATIONS[operation].taped) and not what.endswith("send"):
                labels[self.tape.operations[-1]] = operation, unit

    plain_note = Device.note
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Device, "note", note))
        for method in METHODS:
            patches.enter_context(within(*method))
        yield labels


# By the simulator


def by_simulator(training: Training) -> Order:
    nodes, ranks = training.case.shape
    workload = replace(
        training.case.workload,
        policy=training.policy,
        accumulation=training.accumulation,
        recomputed=float(training.checkpointing),
        exchanges=training.exchanges,
    )
    hardware = cluster("a40", nodes=nodes, ranks_per_node=ranks, inter_bits_per_s=1e9)
    units = layout(workload, nodes, ranks)
    tiers, _ = place(workload, units, hardware)
    names = [unit.name for unit in units.units]
    order = defaultdict(list)
    for task in Step(workload, units, tiers, hardware, sums_on_host=False).build().tasks:
        for name, operation in OPERATIONS.items():
            # An exchange with nobody moves nothing.
            if task.stream == operation.stream and operation.link in task.demands:
                unit = _UNIT.fullmatch(task.name)[1]
                order[task.stream].append((name, names.index(unit)))
                break
    return dict(order)


FULL = Case("llama")
#: Adapters that stay gathered; that are gathered again; that have more parameters than the rest of
#: their blocks, so that what is frozen has a unit of its own.
FEW, MORE, MOST = (Case("llama", rank) for rank in (1, 32, 200))
TWO, THREE = (2, 1), (3, 1)

TRAININGS = [
    Training(replace(FULL, shape=TWO)),
    Training(replace(FEW, shape=THREE), 2),
    Training(MORE),
    Training(FULL, 2),
    Training(FULL, 2, policy="none"),
    Training(FULL, 2, checkpointing=True),
    Training(FULL, 2, exchanges="flat"),
    Training(Case("gpt2")),
    Training(FEW, 2),
    Training(MORE, 2),
    Training(MORE, policy="none"),
    Training(MOST, 2),
    Training(Case("jamba", 1)),
]


@pytest.fixture(scope="module")
def apart() -> Iterator[Pools]:
    """A process of its own for the accelerator, which PyTorch does not forget again."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_operations_are_the_librarys_in_its_order(apart: Pools, training: Training) -> None:
    (library,) = apart.run(1, by_library, training)
    assert by_simulator(training) == library
