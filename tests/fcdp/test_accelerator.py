"""The accelerator for tests notices what nothing orders, and nothing else."""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Pools


def memory_used_anew(on: Any, waits: bool) -> list[float]:
    """Memory that a side stream still reads is freed on the host, and given out to the next."""
    side, values = on.Stream(), torch.ones(4)
    side.wait_stream(on.here().current)
    with on.here().stream(side):
        doubled = values * 2
        read = side.record_event()
    if waits:
        on.here().current.wait_event(read)
    del values
    overwritten = torch.zeros(4)
    on.here().current.wait_stream(side)
    return (doubled + overwritten).tolist()


def landed(on: Any, waits: bool) -> torch.Tensor:
    """A copy to the host that the host is told not to wait for."""
    landing = torch.zeros(4, device="cpu")
    landing.copy_(torch.ones(4), non_blocking=True)
    if waits:
        on.here().current.synchronize()
    return landing


def host_reads(on: Any, waits: bool) -> list[float]:
    return landed(on, waits).tolist()


def hosts_sum_up(on: Any, waits: bool) -> list[float]:
    """The host changes in place what a copy has brought it, and a collective of hosts sums it."""
    dist.all_reduce(landing := landed(on, waits).add_(1))
    return landing.tolist()


def checksum_of_the_host(on: Any, waits: bool) -> list[float]:
    """The host reads memory by its address, as checksums do."""
    from fcdp.checksum import checksum

    return [float(checksum(landed(on, waits)))]


def own_part_of_a_gather(on: Any, waits: bool) -> list[float]:
    """A rank's part is written by one stream and sent by another, to a rank that waits."""
    rank, side = dist.get_rank(), on.Stream()
    gathered = torch.zeros(2)
    with on.here().stream(side):
        side.wait_stream(on.here().compute)
        gathered[rank].fill_(rank + 1.0)
    if waits:
        on.here().current.wait_stream(side)
    dist.all_gather_into_tensor(gathered, gathered[rank : rank + 1])
    on.here().current.wait_stream(side)
    return gathered.tolist()


def a_thread_of_the_host(on: Any, waits: bool) -> list[float]:
    """A thread writes to memory while the device copies it."""
    memory = torch.ones(4, device="cpu")
    copied = memory.to("taped", non_blocking=True)
    event = on.here().current.record_event()
    with on.here().thread("a thread"):
        if waits:
            event.synchronize()
        memory.zero_()
    return copied.tolist()


CASES: dict[str, tuple[Callable[[Any, bool], list[float]], list[float]]] = {
    function.__name__: (function, expected)
    for function, expected in (
        (memory_used_anew, [2.0] * 4),
        (host_reads, [1.0] * 4),
        (hosts_sum_up, [4.0] * 4),
        (checksum_of_the_host, [float(zlib.crc32(struct.pack("4f", *[1.0] * 4)))]),
        (own_part_of_a_gather, [1.0, 2.0]),
        (a_thread_of_the_host, [1.0] * 4),
    )
}


def on_two_ranks(waits: bool) -> dict[str, tuple[list[Any], list[str], list[str | None]]]:
    """Results of each case, the races seen, and what each of 32 other schedules got wrong."""
    from tests.fcdp import accelerator
    from tests.fcdp.accelerator import device

    outcomes = {}
    for name, (function, _) in CASES.items():
        results, tape = accelerator.run(function, 2, device, waits)
        outcomes[name] = results, tape.races, [tape.replay(seed) for seed in range(32)]
    return outcomes


def test_what_waits_order_is_no_race_in_any_schedule(apart: Pools) -> None:
    (outcomes,) = apart.run(1, on_two_ranks, True)
    for name, (results, races, replays) in outcomes.items():
        assert (name, results) == (name, [CASES[name][1]] * 2)
        assert (name, races, set(replays)) == (name, [], {None})


def test_a_missing_wait_is_a_race_and_some_schedule_is_wrong(apart: Pools) -> None:
    """The values are those of the order of issue: that they are right shows nothing."""
    (outcomes,) = apart.run(1, on_two_ranks, False)
    for name, (results, races, replays) in outcomes.items():
        assert (name, results) == (name, [CASES[name][1]] * 2)
        assert "nothing orders them" in races[0], name
        assert any(replays), (name, races[0])


def leaves() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 leaves")
    dist.all_reduce(torch.ones(1))


def failure() -> str:
    from tests.fcdp import accelerator

    with pytest.raises(accelerator.RankFailed) as caught:
        accelerator.run(leaves, 2)
    return str(caught.value)


def test_a_rank_that_fails_ends_the_others(apart: Pools) -> None:
    (text,) = apart.run(1, failure)
    assert "rank 1 leaves" in text
