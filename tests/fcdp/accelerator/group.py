"""Process groups of ranks that are threads of one process, on the device and on the host.

What a rank sends is what its buffer holds when its part of the collective runs: that part is an
operation of the sender's stream, which all receivers come after, and a receiver writes in another
operation, of its own stream. Hosts wait for each other inside of a collective, which orders nothing
on the tape: on the device nobody would wait.
"""

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fcdp.partial_gradients import Waiting
from tests.fcdp.accelerator import device as devices
from tests.fcdp.accelerator.device import DeviceTensor, Event, Stream, here, plain
from tests.fcdp.accelerator.tape import Clock

BACKEND = "threads"
#: Seconds until ranks that wait for one another are given up.
_PATIENCE_S = 60


#: Has work on plain tensors in the body be nobody's operation.
_unseen = torch._C._DisableTorchDispatch


class Abandoned(RuntimeError):
    """Another rank has failed, or never came."""


@dataclass
class Part:
    """One rank's part of a collective."""

    what: str
    tensors: list[torch.Tensor]
    #: The clock that receivers come after.
    clock: Clock


@dataclass
class Hub:
    """A meeting point of the threads of one run."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tables: dict[Any, dict[int, Part]] = field(default_factory=lambda: defaultdict(dict))
    mail: dict[Any, deque[Part]] = field(default_factory=lambda: defaultdict(deque))
    failed: bool = False

    def gather(self, key: Any, rank: int, size: int, part: Part) -> list[Part]:
        """Wait for the parts of all ranks, and list them in rank order."""
        with self.changed:
            table = self.tables[key]
            table[rank] = part
            if len(table) == size:
                del self.tables[key]
                self.changed.notify_all()
            self._wait(lambda: len(table) == size, f"{part.what} {key}")
        kinds = {each.what for each in table.values()}
        assert len(kinds) == 1, f"ranks are out of step: {sorted(kinds)}"
        return [table[rank] for rank in range(size)]

    def post(self, key: Any, part: Part) -> None:
        with self.changed:
            self.mail[key].append(part)
            self.changed.notify_all()

    def collect(self, key: Any) -> Part:
        with self.changed:
            self._wait(lambda: bool(self.mail[key]), f"a message {key}")
            return self.mail[key].popleft()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        with _unseen():
            random_numbers = torch.get_rng_state()  # each rank's own, as in processes
        if not self.changed.wait_for(lambda: until() or self.failed, _PATIENCE_S) or not until():
            raise Abandoned(f"rank {here().rank} waits in vain for {what}")
        with _unseen():
            torch.set_rng_state(random_numbers)

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class Done(dist.Work):
    """Work that makes others wait: the current stream on the device, the host for the host."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True


class Group(dist.ProcessGroup):
    """A group of threads; ``hub`` is set by the run."""

    hub: Hub

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._count = 0
        self._stream: Stream | None = None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return BACKEND

    def _collective(
        self,
        what: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        results: Callable[[list[list[torch.Tensor]]], Sequence[torch.Tensor]],
        options: Any = None,
    ) -> Any:
        """Exchange ``inputs``; ``results`` computes ``outputs`` from those of all ranks."""
        self._count += 1
        what = f"{what} of {self._size} in {self.group_desc}"
        key, device = (self.group_name, self._count), here()
        on_device = any(isinstance(each, DeviceTensor) for each in (*inputs, *outputs))
        timeline: Any = device.host
        if on_device:
            timeline = device.current
            if getattr(options, "asyncOp", False):
                self._stream = self._stream or Stream()
                self._stream.wait_stream(device.current)
                timeline = self._stream
            device.note(f"{what}'s send", device.touches(inputs), [], stream=timeline)
        reads = device.touches(device.followed(inputs))
        with _unseen():
            sent = [plain(each).clone() for each in inputs]
        part = Part(what, sent, dict(timeline.clock))
        parts = self.hub.gather(key, self._rank, self._size, part)
        for each in parts:
            timeline.wait_for(each.clock)
        with _unseen():
            made = results([each.tensors for each in parts])
            for output, result in zip(outputs, made, strict=True):
                plain(output).copy_(result.view(output.shape))
        if on_device:
            device.note(what, [], outputs, stream=timeline)
            if getattr(options, "asyncOp", None) is False:
                return None  # as NCCL: what is queued on the current stream gives no work
            event = Event()
            event.record(timeline)
            return Done(lambda: here().current.wait_event(event))
        device.note_on_host(what, reads, outputs)
        return Done()

    # Collectives

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None
    ) -> Done:
        # In place, nobody writes the own part.
        places, origins = [], []
        for index, (output, source) in enumerate(zip(outputs, inputs, strict=True)):
            for rank, place in enumerate(output.view(self._size, -1).unbind()):
                if rank != self._rank or place.data_ptr() != source.data_ptr():
                    places.append(place)
                    origins.append((rank, index))
        return self._collective(
            "all-gather",
            inputs,
            places,
            lambda ranks: [ranks[rank][index].flatten() for rank, index in origins],
            options,
        )

    def all_gather_single(self, output: Any, source: Any, options: Any = None) -> Done:
        return self.all_gather_single_coalesced([output], [source], options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> Done:
        def results(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
            parts = [
                [tensor.view(self._size, -1)[self._rank] for tensor in tensors]
                for tensors in zip(*ranks, strict=True)
            ]
            return [_reduced(each, options.reduceOp) for each in parts]

        return self._collective("reduce-scatter", inputs, outputs, results, options)

    def reduce_scatter_single(self, output: Any, source: Any, options: Any) -> Done:
        return self.reduce_scatter_single_coalesced([output], [source], options)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        if isinstance(waiting := tensors[0], Waiting):
            # A group in C++ asks the tensor's class.
            func = torch.ops.c10d.allreduce_.default
            _, work = waiting.__torch_dispatch__(func, [Waiting], (tensors,))
            return dist.Work.unbox(work)
        op = dist.ReduceOp.SUM if options is None else options.reduceOp
        return self._collective(
            "all-reduce",
            tensors,
            tensors,
            lambda ranks: [_reduced(each, op) for each in zip(*ranks, strict=True)],
            options,
        )

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        root = options.rootRank
        mine = self._rank == root
        return self._collective(
            "broadcast",
            tensors if mine else [],
            [] if mine else tensors,
            lambda ranks: [] if mine else ranks[root],
            options,
        )

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        return self._collective(
            "all-gather of a list",
            inputs,
            outputs[0],
            lambda ranks: [rank[0] for rank in ranks],
            options,
        )

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Done:
        mine = self._rank == options.rootRank
        return self._collective(
            "gather",
            inputs,
            outputs[0] if mine else [],
            lambda ranks: [rank[0] for rank in ranks] if mine else [],
            options,
        )

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Done:
        mine = self._rank == options.rootRank
        return self._collective(
            "scatter",
            inputs[0] if mine else [],
            outputs,
            lambda ranks: [ranks[options.rootRank][self._rank]],
            options,
        )

    def alltoall(self, outputs: Any, inputs: Any, options: Any = None) -> Done:
        return self._collective(
            "all-to-all",
            inputs,
            outputs,
            lambda ranks: [rank[self._rank] for rank in ranks],
            options,
        )

    def barrier(self, opts: Any = None) -> Done:
        return self._collective("barrier", [], [], lambda ranks: [])

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    # Messages, of the host

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Done:
        _of_host(tensors)
        message = Part("message", [tensors[0].clone()], dict(here().host.clock))
        self.hub.post((self.group_name, self._rank, peer, tag), message)
        return Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Done:
        _of_host(tensors)

        @functools.cache  # whoever waits twice waits once
        def arrive() -> None:
            message = self.hub.collect((self.group_name, peer, self._rank, tag))
            here().host.wait_for(message.clock)
            with _unseen():
                plain(tensors[0]).copy_(message.tensors[0])

        return Done(arrive)


def _of_host(tensors: Sequence[torch.Tensor]) -> None:
    assert not isinstance(tensors[0], DeviceTensor), "on a device nothing goes by messages"


def _reduced(parts: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce in rank order."""
    kind = op.op if hasattr(op, "op") else op
    if kind == dist.ReduceOp.PREMUL_SUM:
        _, factor = op.__getstate__()
        parts, kind = [part * factor for part in parts], dist.ReduceOp.SUM
    if kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        total = functools.reduce(torch.add, parts)
        return total / len(parts) if kind == dist.ReduceOp.AVG else total
    pairwise = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
    return functools.reduce(pairwise[kind], parts)


def _make(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(rank, size)


dist.Backend.register_backend(BACKEND, _make, devices=["cpu", devices.NAME])


# Collectives of DTensors


def _of(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)


def _options(op: str) -> Any:
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, op.upper())
    return options


def _all_reduce(tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    _of(name).allreduce([result], _options(op)).wait()
    return result


def _all_gather(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    result = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    _of(name).all_gather_single(result, tensor.contiguous()).wait()
    return result


def _reduce_scatter(tensor: torch.Tensor, op: str, size: int, name: str) -> torch.Tensor:
    result = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    _of(name).reduce_scatter_single(result, tensor.contiguous(), _options(op)).wait()
    return result


_functional = torch.ops._c10d_functional
devices.REPLACED.update(
    {
        _functional.all_reduce.default: _all_reduce,
        _functional.all_gather_into_tensor.default: _all_gather,
        _functional.reduce_scatter_tensor.default: _reduce_scatter,
        _functional.wait_tensor.default: lambda tensor: tensor,
        _functional._wrap_tensor_autograd.default: lambda tensor: tensor,
    }
)
