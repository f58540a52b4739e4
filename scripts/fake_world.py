"""One rank of a world that is imitated: every other rank does as this one does.

PyTorch's ``fake`` process group sends nothing. What it leaves in the receiver's buffers differs by
version, and is uninitialised memory for messages, so the methods that matter are defined here: a
gather gives this rank's part for every rank's, a message received is the one sent to that peer, and
a reduction gives as many of this rank's part. With 2, 4, 8 ... ranks a two-level exchange is then
equal to the one-level exchange of FSDP2 bit for bit, and any rank's decision is this rank's own.
"""

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcdp
from fcdp import exchange
from fcdp.streams import Streams


class DeviceStreams(Streams):
    """An accelerator's streams on the CPU, which order nothing there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.on_host = False


@contextlib.contextmanager
def world(nodes: int, ranks_per_node: int, device_type: str) -> Iterator[fcdp.Topology]:
    """Run the body as rank 0 of ``nodes × ranks_per_node``; end the process group afterwards."""
    ranks = nodes * ranks_per_node
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with _imitation():
            yield fcdp.Topology.build(nodes, ranks_per_node, device_type)
    finally:
        dist.destroy_process_group()


#: Names of collectives among a process group's methods, with those of other versions of torch.
_GATHERS = ("_allgather_base", "all_gather_single")
_SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single")
_SEVERAL_GATHERS = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
_SEVERAL_SCATTERS = ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
#: Those of one tensor, and of several.
SINGLE, COALESCED = (*_GATHERS, *_SCATTERS), (*_SEVERAL_GATHERS, *_SEVERAL_SCATTERS)


@contextlib.contextmanager
def methods(named: Mapping[str, Any]) -> Iterator[None]:
    """Patch these methods of process groups, those that this version of torch has."""
    with contextlib.ExitStack() as stack:
        for name, method in named.items():
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        yield


@contextlib.contextmanager
def _imitation() -> Iterator[None]:
    messages = _Messages()
    imitated: dict[str, Callable[..., None]] = {
        "recv": messages.recv,
        "send": messages.send,
        **dict.fromkeys(_GATHERS, _gather),
        **dict.fromkeys(_SCATTERS, _scatter),
        **dict.fromkeys(_SEVERAL_GATHERS, _each(_gather)),
        **dict.fromkeys(_SEVERAL_SCATTERS, _each(_scatter)),
        "alltoall": _each(_exchange),
    }
    at_once = {name: functools.partialmethod(_at_once, of) for name, of in imitated.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(methods(at_once))
        # On the CPU too, exchange by collectives, as on an accelerator: a reduction by messages
        # would not give this rank's part. A mock would retain its arguments.
        stack.enter_context(mock.patch.object(exchange, "_on_host", new=_nowhere))
        for module in (dist, dist.distributed_c10d):
            # Groups for decisions are asked for over gloo, which this store cannot serve.
            stack.enter_context(mock.patch.object(module, "new_group", _fake_group))
        yield


def _nowhere(_: torch.Tensor) -> bool:
    return False


_new_group = dist.new_group


def _fake_group(*args: Any, **kwargs: Any) -> Any:
    return _new_group(*args, **{**kwargs, "backend": "fake"})


class _Done(dist.Work):
    """Work that was queued on the current stream by the call: nothing is left to wait for."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def _at_once(
    group: dist.ProcessGroup, method: Callable[..., None], *args: Any, **kwargs: Any
) -> dist.Work:
    with torch.no_grad():
        method(group, *args)
    return _Done()


def _gather(group: dist.ProcessGroup, output: torch.Tensor, part: torch.Tensor, *_: Any) -> None:
    rows, rank = output.view(group.size(), -1), group.rank()
    if rows[rank].data_ptr() != part.data_ptr():
        rows[rank].copy_(part.view(-1))
    rows[:rank].copy_(rows[rank])
    rows[rank + 1 :].copy_(rows[rank])


def _scatter(
    group: dist.ProcessGroup, output: torch.Tensor, whole: torch.Tensor, options: Any
) -> None:
    output.view(-1).copy_(whole.view(group.size(), -1)[group.rank()])
    if options.reduceOp == dist.ReduceOp.SUM:
        output.mul_(group.size())


def _exchange(_: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor, *_of: Any) -> None:
    received.copy_(sent)


def _each(method: Callable[..., None]) -> Callable[..., None]:
    def all_of_them(
        group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *of: Any
    ) -> None:
        for output, tensor in zip(outputs, inputs, strict=True):
            method(group, output, tensor, *of)

    return all_of_them


class _Messages:
    """Messages to and from a peer: the n-th received is the n-th sent."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._sent: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)

    def recv(
        self, group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, *_: Any
    ) -> None:
        self._awaited[id(group), peer].extend(tensors)
        self._deliver((id(group), peer))

    def send(
        self, group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, *_: Any
    ) -> None:
        self._sent[id(group), peer].extend(tensors)
        self._deliver((id(group), peer))

    def _deliver(self, pair: tuple[int, int]) -> None:
        while self._awaited[pair] and self._sent[pair]:
            received, sent = self._awaited[pair].popleft(), self._sent[pair].popleft()
            # A message may be shorter than the place that waits for it.
            received.view(-1)[: sent.numel()].copy_(sent.view(-1))
