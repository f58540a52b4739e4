"""Micro-batches of one unit, reduced between ranks that are threads or only note calls."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fcdp.arena import Arena
from fcdp.counts import Ledger
from fcdp.engine import Engine
from fcdp.exchange import Pending, Then
from fcdp.in_flight import Arriving, HostReduceScatter, InFlight
from fcdp.partial_gradients import HostSum, PartialGradients, Waiting, waiting_in
from fcdp.streams import Slices, Streams
from tests.fcdp.releases import since_2_13
from tests.fcdp.stand_ins import CPU, NoFailures, Place, StandInUnit, on_threads
from tests.fcdp.test_in_flight import in_backward

NUMEL = 3
SUM: Any = dist.ReduceOp.SUM
#: FSDP2's, which nothing asks.
NO_GROUP: Any = None


class Weight:
    def __init__(self) -> None:
        self.grad: Any = None
        self.requires_grad = True

    def wait(self) -> None:
        """Set ``.grad`` as FSDP2 leaves it after a micro-batch that does not cross nodes."""
        if waiting_in(self) is None:  # type: ignore[arg-type]
            self.grad = SimpleNamespace(
                _local_tensor=Waiting((1,), (1,), dtype=torch.float32, device=CPU)
            )


class Reducer:
    """Reductions of one unit on one rank, called as FSDP2 calls them."""

    def __init__(
        self, topology: Any, unit: StandInUnit | None = None, world: Any = None, hook: Any = None
    ) -> None:
        self.topology, self.ledger = topology, Ledger()
        stand_in: Any = unit or StandInUnit("unit", 4, params=(Weight(),))
        stand_in.topology = topology
        self.weights = stand_in.params
        self.reduce = HostReduceScatter(
            stand_in,
            InFlight(NoFailures()),  # type: ignore[arg-type]
            partials=PartialGradients(self.ledger),
            ledger=self.ledger,
            world=world,
            hook=hook,
        )

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.reduce.allocate((numel,), dtype=dtype, device=CPU)

    def wait(self, *weights: Weight) -> None:
        """Let the gradients of ``weights`` wait, as after a micro-batch."""
        for weight in weights:
            weight.wait()
        self.reduce._waiting = [weight.grad._local_tensor for weight in weights]

    def __call__(self, gradients: torch.Tensor, *, last: bool = True, op: Any = SUM) -> Any:
        """This rank's part, once it has arrived; ``None`` of a micro-batch that waits."""
        self.reduce.requires_sync = last
        buffer = self.allocate(gradients.numel(), gradients.dtype)
        buffer.copy_(gradients)
        output = self.allocate(gradients.numel() // self.topology.world_size, gradients.dtype)
        self.reduce(output, buffer, NO_GROUP, op)
        buffer.fill_(torch.nan)  # FSDP2 uses it again
        if isinstance(output, Waiting):
            self.wait(*self.weights)
            return None
        return output.ended() if isinstance(output, Arriving) else output


@pytest.mark.parametrize("op", [SUM, dist.ReduceOp.AVG], ids=str)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1), (1, 2)])
def test_micro_batches_cross_nodes_once_as_their_sum(
    nodes: int, ranks_per_node: int, op: Any
) -> None:
    world = nodes * ranks_per_node

    def step(topology: Any) -> tuple[list[Any], list[bool], dict[str, dict[str, int]]]:
        topology.inter = topology.intra = None  # of gathers, and no reductions'
        reducer = Reducer(topology)
        gradients = torch.arange(1.0, world * NUMEL + 1) * (topology.rank + 1)
        outputs, pending = [], []
        for last in (False, False, True, True):
            output = reducer(gradients, last=last, op=op)
            outputs.append(output if output is None else output.tolist())
            pending.append(reducer.reduce.pending)
        return outputs, pending, reducer.ledger.snapshot()

    inside, across = 4 * (ranks_per_node - 1) * nodes * NUMEL * 4, 2 * (nodes - 1) * NUMEL * 4
    sent = {"inter_node": {"reduce": across}} if nodes > 1 else {}
    sent |= {"intra_node": {"reduce": inside}} if ranks_per_node > 1 else {}
    for rank, (outputs, pending, bytes_sent) in enumerate(on_threads(nodes, ranks_per_node, step)):
        once = torch.arange(1.0, world * NUMEL + 1).view(world, -1)[rank] * (world + 1) / 2
        once *= 1 if op == dist.ReduceOp.AVG else world
        if nodes == 1:  # nothing waits where nothing is to be saved
            assert outputs == [once.tolist()] * 4
        else:
            assert outputs == [None] * 2 + [(3 * once).tolist(), once.tolist()]
        assert pending == [nodes > 1, nodes > 1, False, False]
        assert bytes_sent == sent


def test_flat_each_micro_batch_goes_round_all_ranks_at_once() -> None:
    def step(topology: Any) -> tuple[list[list[float]], bool, dict[str, dict[str, int]]]:
        world, topology.intra, topology.reduce_intra = topology.intra, None, None
        topology.nodes, topology.ranks_per_node = 2, 2
        reducer = Reducer(topology, world=world)
        gradients = torch.arange(4.0 * NUMEL) * 10**topology.rank
        outputs = [reducer(times * gradients).tolist() for times in (1, 2)]
        return outputs, reducer.reduce.pending, reducer.ledger.snapshot()

    sent = 2 * 3 * NUMEL * 4
    for rank, (outputs, pending, bytes_sent) in enumerate(on_threads(1, 4, step)):
        once = torch.arange(4.0 * NUMEL).view(4, -1)[rank] * 1111
        assert outputs == [once.tolist(), (2 * once).tolist()]
        assert not pending
        assert bytes_sent == {link: {"reduce": sent // 2} for link in ("inter_node", "intra_node")}


@pytest.mark.parametrize(
    ("micro_batches", "value"),
    [(3, 28672.0), (2, 30000.0), (2, 2.0**-24), (5, 6400.0)],
    ids=["sum", "two", "smallest", "five"],
)
def test_a_sum_in_fp16_neither_overflows_nor_vanishes(micro_batches: int, value: float) -> None:
    def step(topology: Any) -> tuple[torch.dtype, float, int]:
        reducer = Reducer(topology)
        gradients = torch.full((2,), value, dtype=torch.float16)
        for _ in range(micro_batches - 1):
            reducer(gradients, last=False)
        total = reducer(gradients)
        return total.dtype, total.item(), reducer.ledger.total("inter_node")

    expected = 2 * micro_batches * torch.tensor(value).half().item()
    assert on_threads(2, 1, step) == [(torch.float32, expected, 2)] * 2


def test_a_sum_is_wider_than_fp16_where_it_ends_alone() -> None:
    reducer = Reducer(Place(2, 0))
    dtypes = []
    for waits, last, dtype in (
        *((False, True, torch.float16), (True, False, torch.float16), (True, True, torch.float16)),
        (True, True, torch.bfloat16),
    ):
        reducer.reduce.discard()
        if waits:
            reducer.reduce._keep(torch.ones(8, dtype=dtype))
            reducer.wait(*reducer.weights)
        reducer.reduce.requires_sync = last
        # An input, its output, and the next input.
        dtypes.append([reducer.allocate(numel, dtype).dtype for numel in (8, 4, 8)])
    half, wide, brain = torch.float16, torch.float32, torch.bfloat16
    assert dtypes == [[half] * 3, [half] * 3, [half, wide, half], [brain] * 3]
    assert reducer.allocate(4, half).dtype == wide  # of the input before


@pytest.mark.parametrize("wide", [True, False])
def test_a_codec_is_given_a_sum_in_the_dtype_that_it_takes(wide: bool) -> None:
    hook = mock.Mock(wide=wide)
    hook.start.return_value = []
    reducer = Reducer(Place(2, 0), hook=hook)
    one = torch.ones(8, dtype=torch.bfloat16)
    reducer(one, last=False)
    reducer(one)
    ((_, total),) = (call.args for call in hook.start.mock_calls)
    assert total.dtype == (torch.float32 if wide else torch.bfloat16)
    assert total.tolist() == [2.0] * 8


@pytest.mark.parametrize(
    ("nodes", "last", "hooked", "world", "goes_on"),
    [
        (2, True, False, None, True),
        (1, True, False, None, False),
        (2, False, False, None, False),
        (2, True, True, None, False),
        (2, True, False, "all ranks", False),
    ],
)
def test_backward_goes_on_where_gradients_cross_and_nobody_looks(
    nodes: int, last: bool, hooked: bool, world: Any, goes_on: bool
) -> None:
    reducer = Reducer(Place(nodes, 0, 2 // nodes), StandInUnit("unit", 4, hooked=hooked), world)
    reducer.reduce.requires_sync = last
    arriving = [isinstance(reducer.allocate(numel, torch.float32), Arriving) for numel in (8, 4)]
    assert arriving == [False, goes_on]


def test_what_waits_is_read_by_nobody_and_what_is_frozen_by_all() -> None:
    weights = Weight(), Weight()
    reducer = Reducer(Place(2, 0), StandInUnit("unit", 4, params=weights))
    shown = torch.ones(1)
    for weight in weights:
        weight.grad = SimpleNamespace(_local_tensor=shown)
    weights[1].requires_grad = False
    reducer.reduce.requires_sync = False
    buffer, output = (reducer.allocate(numel, torch.float32) for numel in (4, 2))
    assert isinstance(output, Waiting)
    assert output.stride() == (1,)
    reducer.reduce(output, buffer.fill_(1.0), NO_GROUP, SUM)
    hidden, frozen = (weight.grad._local_tensor for weight in weights)
    assert isinstance(hidden, Waiting)
    assert frozen is shown


def waiting() -> tuple[Reducer, list[Weight]]:
    """Partial gradients of three parameters: of two in this micro-batch; the last is frozen."""
    weights = [Weight() for _ in range(4)]
    weights[3].requires_grad = False
    reducer = Reducer(Place(2, 0), StandInUnit("unit", 4, params=tuple(weights)))
    reducer.reduce._keep(torch.ones(2))
    reducer.wait(*weights[:2])
    return reducer, weights


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("zeroed", [True, False])
def test_some_gradients_given_up_between_micro_batches_are_an_error(
    place: int, zeroed: bool
) -> None:
    reducer, weights = waiting()
    weights[3].grad = torch.ones(1)  # of nobody's concern
    reducer.reduce.drop_abandoned()
    assert reducer.reduce.pending
    if zeroed:
        weights[place].grad._local_tensor.zero_()
    else:
        weights[place].grad = None
    with pytest.raises(RuntimeError, match=r"unit: \.grad of some of its parameters were zeroed"):
        reducer.reduce.drop_abandoned()
    reducer.reduce.discard()
    reducer.reduce.drop_abandoned()
    assert not reducer.reduce.pending


@pytest.mark.parametrize("zeroed", [True, False])
def test_gradients_that_are_gone_or_zeroed_were_given_up(zeroed: bool) -> None:
    reducer, weights = waiting()
    for weight in weights[:2]:
        if zeroed:
            weight.grad._local_tensor.zero_()
        else:
            weight.grad = None
    reducer.reduce.drop_abandoned()
    assert not reducer.reduce.pending
    assert reducer.ledger.pending_bytes == 0


class Noting(NoFailures):
    """Notes that a backward was seen, from which a failure may be told."""

    def __init__(self) -> None:
        self.seen = 0

    def backward_runs(self, *_: Any, **__: Any) -> None:
        self.seen += 1


def test_what_was_given_up_is_no_part_of_the_next_step() -> None:
    def step(topology: Any) -> tuple[list[float], int]:
        topology.failures = Noting()
        reducer = Reducer(topology)
        reducer(torch.ones(2), last=False)
        reducer.weights[0].grad = None
        total = reducer(torch.full((2,), 10.0))  # nobody has a ``.grad`` of before
        return total.tolist(), topology.failures.seen

    assert on_threads(2, 1, step) == [([20.0], 2)] * 2


@pytest.mark.parametrize("last", [True, False])
def test_another_size_than_in_the_micro_batch_before_is_an_error(last: bool) -> None:
    reducer, _ = waiting()
    reducer.reduce._unit.group = Group(2)  # type: ignore[misc]
    reducer.reduce.requires_sync = last
    text = r"^unit: other parameters received gradients .*fcdp\.accumulate\(model, last=True\)"
    with pytest.raises(RuntimeError, match=text):
        reducer.allocate(4, torch.float32)  # before FSDP2 uses it on another stream


class Group:
    """A group like FSDP2's, of parameters that have a gradient or not."""

    def __init__(self, count: int) -> None:
        self.fsdp_params: Any = [Parameter() for _ in range(count)]
        self.reduced: list[str] = []

    def post_backward(self, *unused: Any) -> None:
        self.reduced.append("".join(param.state for param in self.fsdp_params))


class Parameter:
    """A parameter like FSDP2's."""

    def __init__(self) -> None:
        self.unsharded_accumulated_grad: torch.Tensor | None = None
        self._unsharded_param = torch.ones(2)
        self._sharded_param_data, self.mp_policy = torch.ones(1), None

    @property
    def state(self) -> str:
        """Whether it has no gradient, zeros or ones."""
        grad = self.unsharded_accumulated_grad
        if grad is None:
            grad = self._unsharded_param.grad
        return "-" if grad is None else str(int(grad.sum()) // 2)


def test_what_earlier_micro_batches_gave_gradients_to_is_reduced_with_zeros() -> None:
    unit: Any = StandInUnit("unit", 4)
    unit.group = group = Group(4)
    reducer = Reducer(Place(2, 0), unit)

    def micro_batch(present: str, *, times: int = 1) -> str:
        group.reduced.clear()
        with reducer.reduce.accumulating():
            for _ in range(times):
                for param, has in zip(group.fsdp_params, present, strict=True):
                    param._unsharded_param.grad = torch.ones(2) if has == "1" else None
                group.post_backward()
        assert "post_backward" not in vars(group)
        return " ".join(group.reduced)

    assert micro_batch("1100") == "11--"
    assert micro_batch("0010") == "--1-"  # nothing waits: another step has begun
    reducer.reduce.drop_abandoned = lambda: None  # type: ignore[method-assign]  # no .grad here
    reducer.reduce._keep(torch.ones(2))
    assert micro_batch("1000") == "1-0-"
    assert micro_batch("0000", times=2) == "0-0- ----"  # reduced once, as zeros
    assert micro_batch("0001", times=2) == "0-01 0-01"
    group.fsdp_params[0].unsharded_accumulated_grad = torch.ones(2)  # where FSDP2 adds them up
    assert micro_batch("0000") == "1-00"
    group.fsdp_params[0].unsharded_accumulated_grad = None
    assert micro_batch("0000") == "0-00"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests to each group, and waits for them; nothing is exchanged."""
    log: list[Any] = []

    def noting(*_: Any, op: Any, group: str) -> list[Pending]:
        log.append((op, group))
        return [Then(lambda: log.append(f"wait {group}"))]

    for name in ("reduce_scatter", "reduce_scatter_parts"):
        monkeypatch.setattr(f"fcdp.reduce_scatter.{name}", noting)
    return log


INSIDE, ACROSS = "intra of reductions", "inter of reductions"


@pytest.mark.parametrize("op", [SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM], ids=str)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_gradients_are_scaled_once(ranks_per_node: int, op: Any, asked: list[Any]) -> None:
    """FSDP2 asks NCCL for a sum of scaled gradients; with gloo it divides the sum."""
    gradients = torch.empty(2 * ranks_per_node)
    Reducer(Place(2, 0, ranks_per_node)).reduce(torch.empty(1), gradients, NO_GROUP, op)
    across = op if op == dist.ReduceOp.AVG or ranks_per_node == 1 else SUM
    inside = [(op, INSIDE), f"wait {INSIDE}"] if ranks_per_node > 1 else []
    assert asked == [*inside, (across, ACROSS), f"wait {ACROSS}"]


@pytest.mark.parametrize(
    ("hooked", "after"),
    [(False, ["computed", f"wait {ACROSS}"]), (True, [f"wait {ACROSS}", "computed"])],
)
def test_backward_goes_on_while_gradients_cross_nodes_unless_a_hook_waits_for_them(
    hooked: bool, after: list[str], asked: list[Any]
) -> None:
    """Inside the node it waits in either case."""
    reducer = Reducer(Place(2, 0, 2), StandInUnit("unit", 4, hooked=hooked))

    def reduce() -> None:
        gradients, output = (reducer.allocate(numel, torch.float32) for numel in (8, 2))
        assert type(gradients) is torch.Tensor
        assert isinstance(output, Arriving) != hooked
        reducer.reduce(output, gradients, NO_GROUP, SUM)

    in_backward(reduce, lambda: asked.append("computed"))
    assert asked == [(SUM, INSIDE), f"wait {INSIDE}", (SUM, ACROSS), *after]


@pytest.mark.parametrize(
    ("device_type", "allowed", "asked"),
    [
        pytest.param("cuda", 1, [2], marks=since_2_13),
        ("cuda", 3, []),
        ("cuda", None, []),
        ("cpu", 1, []),
    ],
)
def test_a_second_reduction_may_be_in_flight_where_fsdp2_has_its_default(
    device_type: str, allowed: int | None, asked: list[int]
) -> None:
    """Backward would wait for the reduction before, which crosses nodes; a user's limit stays."""
    group = SimpleNamespace(reduce_scatter_max_input_buffers=allowed)
    unit = mock.Mock(group=group, topology=SimpleNamespace(world_size=2))
    engine: Any = mock.MagicMock(_streams=SimpleNamespace(on_host=device_type == "cpu"))
    engine._reduce_hook.return_value = None
    Engine._reduction(engine, unit)
    calls = unit.module.set_reduce_scatter_max_input_buffers.call_args_list
    assert calls == [mock.call(number, recurse=False) for number in asked]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(params=["device", "host"])
def partials(request: pytest.FixtureRequest, ledger: Ledger) -> Any:
    return PartialGradients(ledger, host_sum() if request.param == "host" else None)


def host_sum() -> HostSum:
    streams = Streams(CPU)
    return HostSum(Arena(64, CPU).take(64), streams, Slices(streams, streams.sums_in, retain=1))


def test_a_buffer_of_fsdp2s_may_change_after_it_was_added(partials: Any) -> None:
    partial = torch.ones(4)
    partials.add(partial, owned=False)
    partial.fill_(100.0)
    assert partials.take(torch.full((4,), 2.0)).tolist() == [3.0] * 4
    assert partials.numel == 0


def test_a_sum_that_was_taken_is_nobody_elses(partials: Any) -> None:
    partials.add(torch.ones(4), owned=True)
    taken = partials.take(torch.ones(4))
    partials.add(torch.full((4,), 9.0), owned=True)
    assert taken.tolist() == [2.0] * 4


def test_each_copy_to_the_host_and_back_is_counted(ledger: Ledger) -> None:
    waiting = PartialGradients(ledger, host_sum())
    for _ in range(3):
        waiting.add(torch.ones(4, dtype=torch.bfloat16), owned=True)
    waiting.take(torch.ones(4))
    for link in ("device_to_host", "host_to_device"):
        assert ledger.bytes[link] == {"reduce": 3 * 4 * 4}, link


def test_narrow_gradients_are_added_in_single_precision(partials: Any) -> None:
    for value in (1.0, 2**-9, 2**-9):
        partials.add(torch.tensor([value], dtype=torch.bfloat16), owned=True)
    assert partials.count == 3
    total = partials.take(torch.tensor([2**-8 - 2**-10], dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    # Added up in bfloat16 the small ones would each have been rounded away.
    assert total.item() == 1 + 2**-7 - 2**-10
    assert partials.count == 0


def test_what_is_discarded_waits_no_more(partials: Any, ledger: Ledger) -> None:
    partials.add(torch.ones(4), owned=True)
    assert partials.numel == 4
    partials.discard()
    assert partials.numel == ledger.pending_bytes == 0
