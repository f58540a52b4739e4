"""The exchanges: what each rank sends, to whom, and what arrives; ranks are threads."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fcdp import exchange
from fcdp.exchange import (
    all_gather,
    all_reduce,
    all_to_all,
    any_rank,
    on_every_rank,
    swap,
    wait_all,
)
from tests.fcdp.stand_ins import NoFailures, Uncounted, on_threads

SHAPES = pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1), (1, 2)])


@SHAPES
def test_ranks_agree_on_the_host_in_groups_of_their_own(nodes: int, ranks_per_node: int) -> None:
    """Others carry what FSDP2's streams and another thread exchange at the same time."""

    def agree(topology: Any) -> tuple[list[bool], list[list[int]]]:
        topology.inter = topology.intra = topology.reduce_inter = topology.reduce_intra = None
        values = torch.tensor([topology.rank, 10 * topology.rank])
        with torch.device("meta"):  # whatever the default device
            flags = any_rank([topology.rank == place for place in range(5)], topology)
        return flags, on_every_rank(values, topology).tolist()

    world = nodes * ranks_per_node
    expected = [place < world for place in range(5)], [[rank, 10 * rank] for rank in range(world)]
    assert on_threads(nodes, ranks_per_node, agree) == [expected] * world


class Detecting(NoFailures):
    """Failures of ranks of which one may be at another exchange than it should be."""

    def raise_out_of_step(self, who: str = "ranks") -> None:
        raise LookupError("out of step")


@pytest.mark.parametrize("places", [(5, 5), (5, 4), (0, 2**15), (2**16, 0)])
def test_ranks_at_different_exchanges_are_detected(places: tuple[int, int]) -> None:
    """Sixteen bits of a place are compared."""

    def agree(topology: Any) -> list[bool] | None:
        topology.failures = Detecting()
        topology.exchanges = Uncounted()
        topology.exchanges.place = places[topology.rank]
        try:
            return any_rank([topology.rank == 1, False], topology)
        except LookupError:
            return None

    same = places[0] % 2**16 == places[1] % 2**16
    assert on_threads(2, 1, agree) == [[True, False] if same else None] * 2


@SHAPES
@pytest.mark.filterwarnings("error")  # of an output of another size, which torch would make fit
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_reduce_sums_and_counts_what_it_sends(
    nodes: int, ranks_per_node: int, dtype: torch.dtype
) -> None:
    def on_rank(topology: Any) -> tuple[list[int], tuple[int, int]]:
        topology.inter = topology.intra = None  # of gathers, and no reductions'
        buffer = torch.arange(12, dtype=dtype) * (topology.rank + 1)
        sent = all_reduce(buffer, topology)
        return buffer.tolist(), sent

    world = nodes * ranks_per_node
    total = world * (world + 1) // 2
    size = 12 // world * dtype.itemsize
    expected = (
        [total * each for each in range(12)],
        (2 * (nodes - 1) * size, 2 * (ranks_per_node - 1) * nodes * size),
    )
    assert on_threads(nodes, ranks_per_node, on_rank) == [expected] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_reduction_adds_in_rank_order_and_divides_an_average(world: int) -> None:
    values = torch.tensor([1e8, -1e8, 3.0])  # 0 in another order
    if world == 2:
        values = torch.tensor([1.0, 3.0])

    def on_rank(topology: Any) -> list[float]:
        results = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            output = torch.empty(1)
            buffer = values[topology.rank].repeat(world)
            wait_all(exchange.reduce_scatter([output], [buffer], op=op, group=topology.inter))
            results.append(output.item())
        return results

    total = {2: 4.0, 3: 3.0}[world]
    assert on_threads(world, 1, on_rank) == [[total, total / world]] * world
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        with pytest.raises(ValueError, match="must be a sum or an average"):
            exchange.reduce_scatter([], [values], op=op, group=mock.Mock())


def test_a_ring_reduces_to_each_rank_its_part_and_sends_to_the_next_alone() -> None:
    world, sent = 3, defaultdict[int, list[tuple[int, int]]](list)

    def noted(received: Any, parts: Any, group: Any) -> Any:
        sent[group.rank()] += [(peer, part.nbytes) for peer, part in parts]
        return swap(received, parts, group)

    def on_rank(topology: Any) -> list[float]:
        output, buffer = torch.empty(2), torch.arange(2.0 * world) * 10**topology.rank
        exchange.ring_reduce_scatter(output, buffer, op=dist.ReduceOp.SUM, group=topology.intra)
        return output.tolist()

    with mock.patch("fcdp.exchange.swap", noted):
        results = on_threads(1, world, on_rank)
    assert results == [[111.0 * 2 * rank, 111.0 * (2 * rank + 1)] for rank in range(world)]
    assert sent == {rank: [((rank + 1) % world, 8)] * (world - 1) for rank in range(world)}


def test_of_a_ring_each_rank_counts_its_share_of_what_leaves_the_node() -> None:
    topology: Any = mock.Mock(world_size=8, ranks_per_node=4)
    assert exchange.ring_bytes(8, topology) == (7 * 8 / 4, 7 * 8 * 3 / 4)


@pytest.mark.parametrize("ring", [False, True])
def test_parts_are_gathered_and_reduced_each_in_its_place(ring: bool) -> None:
    def on_rank(topology: Any) -> tuple[list[float], list[float], list[list[float]]]:
        mine = torch.full((2,), float(topology.rank))
        copied, placed = torch.empty(4), torch.empty(4)
        placed.view(2, -1)[topology.rank] = mine
        wait_all(all_gather([copied], topology.inter, [mine], ring=ring))
        wait_all(all_gather([placed], topology.inter, ring=ring))
        output, buffer, op = torch.empty(6), torch.arange(12.0), dist.ReduceOp.SUM
        wait_all(exchange.reduce_scatter_parts(output, buffer, 3, op=op, group=topology.inter))
        return copied.tolist(), placed.tolist(), output.view(3, 2).tolist()

    gathered = [0.0, 0.0, 1.0, 1.0]
    for rank, results in enumerate(on_threads(2, 1, on_rank)):
        reduced = 2 * torch.arange(12.0).view(3, 2, 2)[:, rank]
        assert results == (gathered, gathered, reduced.tolist())


def test_dtypes_that_gloo_does_not_know_are_gathered_and_so_is_nothing() -> None:
    def on_rank(topology: Any) -> list[int]:
        nothing, mine = torch.empty(0), torch.tensor([topology.rank], dtype=torch.int16)
        whole = torch.empty(2, dtype=torch.int16)
        wait_all(all_gather([nothing, whole], topology.inter, [nothing, mine], ring=True))
        return whole.tolist()

    assert on_threads(2, 1, on_rank) == [[0, 1]] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_each_part_goes_to_its_rank_and_the_own_stays(world: int) -> None:
    def on_rank(topology: Any) -> list[float]:
        sent = [torch.tensor([10.0 * topology.rank + to]) for to in range(world)]
        received = [torch.tensor([-1.0]) for _ in range(world)]
        wait_all(all_to_all(received, sent, topology.inter))
        return [part.item() for part in received]

    expected = [[-1.0 if a == b else 10.0 * a + b for a in range(world)] for b in range(world)]
    assert on_threads(world, 1, on_rank) == expected


class Recording:
    """A group of an accelerator: what is asked of it, call by call."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self._size, self._rank = size, rank
        self.calls: list[str] = []

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        self.calls.append(f"all-gather of {len(outputs)}, asynchronous {options.asyncOp}")
        return mock.Mock(wait=lambda: self.calls.append("waited for"))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        self.calls.append(f"reduce-scatter of {len(outputs)}, asynchronous {options.asyncOp}")
        self.reduced_by = options.reduceOp
        return mock.Mock(wait=lambda: self.calls.append("waited for"))

    def _allgather_base(self, output: Any, source: Any, options: Any) -> None:
        self.calls.append(f"all-gather of {source.tolist()}, asynchronous {options.asyncOp}")

    def _reduce_scatter_base(self, output: Any, source: Any, options: Any) -> None:
        self.calls.append(f"reduce-scatter of one, asynchronous {options.asyncOp}")
        self.reduced, self.reduced_by = (output, source), options.reduceOp


@contextmanager
def on_an_accelerator(name: str) -> Iterator[mock.Mock]:
    with mock.patch("fcdp.exchange._on_host", return_value=False), mock.patch(name) as called:
        yield called


def test_an_accelerator_exchanges_one_tensor_by_one_plain_collective() -> None:
    """NCCL's are queued, and return no work."""
    group: Any = Recording(2, rank=1)
    whole, part, op = torch.arange(6.0), torch.empty(3), dist.ReduceOp.AVG
    with mock.patch("fcdp.exchange._on_host", return_value=False):
        assert all_gather([whole], group) == []
        assert exchange.reduce_scatter([part], [whole], op=op, group=group) == []
    assert group.calls == [
        "all-gather of [3.0, 4.0, 5.0], asynchronous False",  # in its place already
        "reduce-scatter of one, asynchronous False",
    ]
    assert group.reduced_by == op


def test_an_accelerator_exchanges_parts_by_one_collective_without_its_own() -> None:
    group: Any = Recording(3, rank=1)
    sent, received = [torch.arange(2.0) + rank for rank in range(3)], [torch.empty(2)] * 3
    with on_an_accelerator("torch.distributed.all_to_all") as called:
        assert all_to_all(received, sent, group) == []
    outputs, inputs = called.call_args.args
    assert [part.numel() for part in outputs] == [part.numel() for part in inputs] == [2, 0, 2]
    assert [part.tolist() for part in inputs] == [[0.0, 1.0], [], [2.0, 3.0]]


def test_a_rank_may_send_alone_and_another_receive_alone() -> None:
    def on_rank(topology: Any) -> list[float]:
        part = torch.full((2,), float(topology.rank))
        parts = [(1 - topology.rank, part)]
        received, sent = ([], parts) if topology.rank == 0 else (parts, [])
        wait_all(swap(received, sent, topology.inter))
        return part.tolist()

    assert on_threads(2, 1, on_rank) == [[0.0, 0.0]] * 2
    assert on_threads(1, 1, lambda topology: swap([], [], topology.inter)) == [[]]


def test_what_follows_an_exchange_runs_once_it_is_waited_for() -> None:
    done: list[str] = []
    first, then = (
        exchange.Then(lambda: done.append("first")),
        exchange.Then(lambda: done.append("then")),
    )
    assert done == []
    wait_all([first, then])
    assert done == ["first", "then"]


def test_what_is_not_on_the_cpu_goes_in_one_batch_whatever_the_group_is_called() -> None:
    """Unbatched, NCCL runs a pair's receive before its send, on both sides: neither would start."""
    tensor, group = torch.empty(2, device="meta"), mock.Mock()
    # As of ``init_process_group("cpu:gloo,cuda:nccl")``: a name that says gloo too.
    group.name.return_value = name = "cpu:gloo,cuda:nccl"
    with (
        mock.patch("torch.distributed.get_backend", return_value=name),
        mock.patch("torch.distributed.P2POp", side_effect=lambda op, *_, **__: op.__name__),
        mock.patch("torch.distributed.batch_isend_irecv", return_value=["work"]) as batch,
    ):
        assert swap([(1, tensor)], [(1, tensor)], group) == ["work"]
    batch.assert_called_once_with(["irecv", "isend"])


def test_an_accelerator_is_asked_for_one_collective_however_many_parts() -> None:
    group: Any = Recording(8)
    whole = [torch.empty(8 * 4, device="meta") for _ in range(64)]
    parts = [torch.empty(4, device="meta") for _ in range(64)]
    assert all_gather(whole, group, parts) == []
    assert exchange.reduce_scatter(parts, whole, op=dist.ReduceOp.AVG, group=group) == []
    assert group.reduced_by == dist.ReduceOp.AVG
    assert group.calls == [
        "all-gather of 64, asynchronous False",
        "waited for",
        "reduce-scatter of 64, asynchronous False",
        "waited for",
    ]


@pytest.mark.parametrize(("nodes", "parts"), [(16, 16), (17, 1), (64, 1)])
def test_what_an_accelerator_is_given_does_not_grow_with_the_nodes(nodes: int, parts: int) -> None:
    group: Any = Recording(2)
    output, buffer = torch.empty(nodes * 3), torch.arange(nodes * 2 * 3.0).view(nodes, 2, 3)
    op = dist.ReduceOp.SUM
    with mock.patch("fcdp.exchange._on_host", return_value=False):
        works = exchange.reduce_scatter_parts(output, buffer.view(-1), nodes, op=op, group=group)
    assert works == []
    if parts > 1:
        assert group.calls == [f"reduce-scatter of {parts}, asynchronous False", "waited for"]
        return
    assert group.calls == ["reduce-scatter of one, asynchronous False"]
    given_output, given_input = group.reduced
    assert given_output.data_ptr() == output.data_ptr()
    for rank, of_rank in enumerate(given_input.view(2, nodes, 3)):
        assert torch.equal(of_rank, buffer[:, rank])


def test_a_gather_on_the_host_goes_round_a_ring_where_that_is_asked_for() -> None:
    group = mock.Mock(**{"size.return_value": 2, "rank.return_value": 0})
    with mock.patch.object(exchange, "swap_rows", return_value=[]) as swap_rows:
        exchange.all_gather([torch.zeros(4)], group, ring=True)
        assert (group._allgather_base.call_count, swap_rows.call_count) == (1, 0)
        exchange.all_gather([torch.zeros(4)], group)
        assert (group._allgather_base.call_count, swap_rows.call_count) == (1, 1)
