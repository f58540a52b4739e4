"""Runs a function on several ranks of one process, each a thread with an accelerator of its own."""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import fcdp.checksum
import fcdp.direct_io
from fcdp.extensions import held, names_inside
from tests.fcdp.accelerator.device import NAME, Device, Stream, driving, here, read_by_address
from tests.fcdp.accelerator.group import BACKEND, Abandoned, Group, Hub
from tests.fcdp.accelerator.tape import Tape
from tests.fcdp.stand_ins import NoFailures


class Threads:
    """A stand-in for a pool of threads that runs each task at once, as a thread of its own."""

    def __init__(self, most: int, thread_name_prefix: str) -> None:
        self._name = thread_name_prefix

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        device = here()
        with device.thread(self._name) as thread:
            try:
                done.set_result(function(*args))
            except OSError as error:
                done.set_exception(error)
        result = done.result

        def joined(timeout: float | None = None) -> Any:
            device.host.wait_for(thread.clock)
            return result(timeout)

        done.result = joined  # type: ignore[method-assign]
        return done


def _noted(name: str, *, writes: bool) -> Any:
    """A function of ``fcdp.direct_io`` that moves memory, noted on the tape."""
    plain = getattr(fcdp.direct_io, name)

    def move(descriptor: int, offset: int, memory: torch.Tensor) -> None:
        if not writes:
            read_by_address(name, memory)
        plain(descriptor, offset, memory)
        if writes:
            here().note_on_host(name, [], [memory])

    return mock.patch(f"fcdp.direct_io.{name}", move)


def _reset_sharded_param(fsdp_param: Any) -> None:
    """FSDP2's method, which takes a subclass's memory for another tensor's, and pads it anew."""
    module = fsdp_param._module_info
    param = getattr(module.module, module.param_name)
    shards = (fsdp_param._sharded_param_data, param._local_tensor)
    addresses = {
        held(shard, names_inside(shard))[0].untyped_storage().data_ptr() for shard in shards
    }
    if param is not fsdp_param.sharded_param or len(addresses) > 1 or 0 in addresses:
        _plain_reset(fsdp_param)


_plain_reset: Any = FSDPParam.reset_sharded_param


def _bytes_of(values: torch.Tensor) -> memoryview:
    """``fcdp.checksum.bytes_of``, noted: it is asked for what is about to be read."""
    read_by_address("checksum", values)
    return _plain_bytes_of(values)


_plain_bytes_of: Any = fcdp.checksum.bytes_of


def _current_stream(device: Any = None) -> Stream:
    return here().current


def _keys(device: torch.device, count: int) -> torch.Tensor:
    """``fcdp.checksum._keys``, which keeps them per device: ranks here have one name for theirs."""
    state = here().state
    if ("keys", count) not in state:
        state["keys", count] = _plain_keys.__wrapped__(device, count)
    return state["keys", count]


_plain_keys: Any = fcdp.checksum._keys


def _new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
    """``torch.distributed.new_group``, of threads whatever is asked for."""
    return dist.distributed_c10d.new_group(*args, backend=BACKEND, **kwargs)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Give each thread a world of process groups."""
    # Fake tensors of a CUDA build set it each time, without a GPU; threads at once make it crash.
    torch._C._ensureCUDADeviceGuardSet()
    with (
        mock.patch("torch._C._ensureCUDADeviceGuardSet"),
        # Which torch 2.11's own destroy_process_group clears, and its world of threads lacks.
        mock.patch.object(ThreadLocalWorld, "comms", [], create=True),
        mock.patch("torch.distributed.distributed_c10d._world", ThreadLocalWorld()),
        mock.patch.object(FSDPParam, "reset_sharded_param", _reset_sharded_param),
        mock.patch("torch.accelerator.current_stream", _current_stream),
        mock.patch("fcdp.checksum._keys", _keys),
        mock.patch("fcdp.checksum.bytes_of", _bytes_of),
        mock.patch("fcdp.checksum._BLOCK", 1024),  # as many keys would be most of the memory
        mock.patch("fcdp.topology.Failures", return_value=NoFailures()),
        mock.patch("fcdp.cache.tiers.ThreadPoolExecutor", Threads),
        mock.patch("fcdp.checkpoint.saving.ThreadPoolExecutor", Threads),
        mock.patch("torch.distributed.new_group", _new_group),
        _noted("write_all", writes=False),
        _noted("read_all", writes=True),
    ):
        _set_thread_isolation_mode(True)
        try:
            yield
        finally:
            _set_thread_isolation_mode(False)


class RankFailed(AssertionError):
    """Errors that ranks raised, with their tracebacks."""


def run(
    function: Callable[..., Any], world_size: int, *args: Any, seed: int = 0
) -> tuple[list[Any], Tape]:
    """Call ``function(*args)`` on every rank; return the results in rank order, and the tape.

    ``seed`` draws what the host finds of events. Raises :class:`RankFailed`.
    """
    tape, Group.hub = Tape(), Hub()
    store = dist.HashStore()
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}

    def serve(rank: int) -> None:
        try:
            # One thread runs at a time, until it waits for others: they share random numbers.
            with Group.hub.changed, driving(Device(rank, tape, seed)):
                dist.init_process_group(
                    f"cpu:{BACKEND},{NAME}:{BACKEND}", rank=rank, world_size=world_size, store=store
                )
                try:
                    results[rank] = function(*args)
                finally:
                    dist.destroy_process_group()
        except BaseException as error:
            Group.hub.fail()
            if not isinstance(error, Abandoned) or not failures:
                failures[rank] = traceback.format_exc()

    with _one_process():
        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise RankFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
    return [results[rank] for rank in range(world_size)], tape


def check(tape: Tape, seeds: Sequence[int]) -> str | None:
    """A race on a tape, or a wrong read in a schedule of ``seeds``."""
    if tape.races:
        return f"{len(tape.races)} races, the first:\n{tape.races[0]}"
    return next((wrong for seed in seeds if (wrong := tape.replay(seed))), None)
