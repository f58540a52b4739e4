"""Sums of micro-batches' gradients on one rank, and what stands for them in ``.grad``."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fcdp.arena import Arena, aligned
from fcdp.counts import Ledger
from fcdp.partial_gradients import HostSum, PartialGradients, Partials, Waiting, planned_sizes
from fcdp.streams import Slices, Streams
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit

UNITS: list[Any] = [StandInUnit(name, 8) for name in "ab"]
#: Host memory of a sum, in bytes.
ROOM = 64
NOT_KNOWN = "summed up inside the node, and is not known"
allreduce = torch.ops.c10d.allreduce_.default


def on_host() -> PartialGradients:
    streams = Streams(CPU)
    staging = Slices(streams, streams.sums_in, retain=1)
    return PartialGradients(Ledger(), HostSum(Arena(ROOM, CPU).take(ROOM), streams, staging))


@pytest.mark.parametrize("make", [lambda: PartialGradients(Ledger()), on_host])
def test_a_sum_is_widened_by_zeros_where_it_has_nothing(
    make: Callable[[], PartialGradients],
) -> None:
    partials = make()
    for _ in range(2):  # of two nodes, parameters of two elements and of one
        partials.add(torch.arange(1.0, 7.0), owned=False)
    partials.widen([(2, True), (3, False), (1, True)], nodes=2)
    assert (partials.numel, partials.count) == (12, 2)
    total = partials.take(torch.ones(12))
    assert total.tolist() == [3.0, 5, 1, 1, 1, 7, 9, 11, 1, 1, 1, 13]
    assert partials.ledger.pending_bytes == 0


def test_a_sum_that_was_planned_narrower_is_refused() -> None:
    just = ROOM // torch.float32.itemsize
    partials = on_host()
    partials.add(torch.ones(just, dtype=torch.bfloat16), owned=True)
    assert partials.take(torch.ones(just)).tolist() == [2.0] * just
    with pytest.raises(RuntimeError, match="the host memory for them was planned for another"):
        partials.add(torch.ones(just + 1), owned=True)
    with pytest.raises(RuntimeError, match="partial gradients of torch.float64: the host memory"):
        partials.add(torch.ones(just, dtype=torch.float64), owned=True)


class Copies(TorchDispatchMode):
    """Notes of each copy whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.goes_on.append(len(args) > 2 and args[2])
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_no_copy_of_a_sum() -> None:
    partials = on_host()
    with Copies() as copies:
        for _ in range(2):
            partials.add(torch.ones(4), owned=True)
        partials.take(torch.ones(4))
    inside, out, *others = copies.goes_on
    assert (inside, out) == (False, True)  # the first stays on the device, and goes out
    assert others == [True] * 3


def test_sums_on_the_host_share_an_arena_and_two_staging_buffers() -> None:
    ledger = Ledger()
    made = Partials(dict.fromkeys(UNITS, ROOM), STREAMS, ledger)
    sums = [made.of(unit) for unit in UNITS]
    assert made.lacks_memory
    made.allocate()
    assert not made.lacks_memory
    assert ledger.host_partials_bytes == 2 * aligned(ROOM)
    hosts = [each.host for each in sums]
    assert all(host is not None for host in hosts)
    starts = [host.memory.data_ptr() for host in hosts if host is not None]
    assert starts[1] - starts[0] == aligned(ROOM)
    (staging,) = {host.staging for host in hosts if host is not None}
    for _ in range(2):
        for each in sums:
            each.add(torch.ones(4), owned=True)
            # Each is held until what was queued on it has run: at most two with the next one.
            assert len(staging._released) <= 2
    assert [each.take(torch.ones(4)).tolist() for each in sums] == [[3.0] * 4] * 2
    assert staging._released
    staging.take(1, 4, torch.float32, own_row=None)
    assert len(staging._released) == 1
    made.drain()
    assert not staging._released


def test_no_memory_is_lacking_where_no_sum_waits_on_the_host() -> None:
    assert not Partials({}, STREAMS, Ledger()).lacks_memory


def test_sums_are_planned_in_single_precision_or_wider() -> None:
    dtypes = torch.bfloat16, torch.float64, None
    place = Place(nodes=2, node=0)
    units: list[Any] = [
        mock.Mock(topology=place, shard_numel=3, reduce_dtype=dtype) for dtype in dtypes
    ]
    assert planned_sizes(units) == {units[0]: 2 * 3 * 4, units[1]: 2 * 3 * 8}


def whole(numel: int = 6, dtype: torch.dtype = torch.bfloat16) -> Waiting:
    return Waiting((numel,), (1,), dtype=dtype, device=CPU, whole=True)


def part(dtype: torch.dtype = torch.float32) -> Waiting:
    return Waiting((2, 3), (3, 1), dtype=dtype, device=CPU)


def test_fsdp2_goes_on_with_what_waits_as_with_a_gradient() -> None:
    """It divides, adds up over replicas, cuts by dtype, casts, cuts up, and adds to ``.grad``."""
    output = whole(8)
    assert output.div_(4) is output
    reduced, work = Waiting.__torch_dispatch__(allreduce, [Waiting], ([output],))
    assert reduced == [output]
    assert work is not None
    of_dtype = output[1:7]
    assert isinstance(of_dtype, Waiting)
    assert (of_dtype.shape, of_dtype.stride(), of_dtype.dtype) == ((6,), (1,), torch.bfloat16)
    of_dtype.div_(2)
    cast = of_dtype.to(torch.float32)
    assert isinstance(cast, Waiting)
    assert (cast.shape, cast.stride(), cast.dtype, cast.device) == ((6,), (1,), torch.float32, CPU)
    cast.div_(2)
    moved = of_dtype.to("meta")
    assert (moved.dtype, moved.device.type) == (torch.bfloat16, "meta")
    same = Waiting.__torch_dispatch__(torch.ops.aten._to_copy.default, [Waiting], (moved,))
    assert (same.dtype, same.device.type) == (torch.bfloat16, "meta")
    cut = torch.as_strided(cast, (2, 3), (3, 1), storage_offset=0)
    assert isinstance(cut, Waiting)
    assert (cut.shape, cut.stride()) == ((2, 3), (3, 1))
    assert cut.add_(part()) is cut
    for copy in (cut.detach(), cut.clone()):
        assert isinstance(copy, Waiting)


READS: dict[str, Callable[[Waiting], Any]] = {
    "added up": lambda cut: cut.sum(),
    "norm": lambda cut: torch.linalg.vector_norm(cut),
    "scaled": lambda cut: cut.mul_(2),
    "scaled as a whole": lambda _: whole().mul_(2),
    "divided": lambda cut: cut.div_(2),
    "multiplied by another": lambda cut: cut.mul_(part()),
    "cut": lambda cut: cut[0:1],
    "added to": lambda cut: cut.add_(torch.ones(2, 3)),
    "added to a gradient": lambda cut: torch.ones(2, 3).add_(cut),
    "written to an output": lambda cut: torch.add(torch.ones(2, 3), 1, out=cut),
}


@pytest.mark.parametrize("name", READS)
def test_what_waits_is_read_by_nobody(name: str) -> None:
    with pytest.raises(RuntimeError, match=NOT_KNOWN):
        READS[name](part())


def test_gradients_of_before_are_hidden_behind_what_waits() -> None:
    hidden = part()
    hidden.before = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=NOT_KNOWN):
        hidden.sum()


@pytest.mark.parametrize("together", [True, False])
def test_what_is_zeroed_is_zeros(together: bool) -> None:
    cut, plain = part(torch.float64), torch.ones(2)
    if together:
        torch._foreach_zero_([cut, plain])
        assert plain.tolist() == [0.0, 0.0]
    else:
        assert cut.zero_() is cut
    assert cut.zeroed
    shown = cut.detach()
    assert not isinstance(shown, Waiting)
    torch.testing.assert_close(shown, torch.zeros(2, 3, dtype=torch.float64))
    assert (cut + 1).tolist() == [[1.0] * 3] * 2
    assert torch.add(torch.ones(2, 3), cut, alpha=2).tolist() == [[1.0] * 3] * 2
