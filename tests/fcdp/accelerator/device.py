"""An accelerator for PyTorch with tensors of its own, which notes all that touches them.

Its tensors (``taped:0``) have memory of the CPU, and operations run when they are issued, in
that order. What order a device could have run them in is the tape's to say: each is noted on the
stream that was current, with the bytes that it read and wrote. Memory is given out as the caching
allocator of CUDA does it: what is let go on the host is given out at once to the next who asks on
the stream that it was allocated on, whether the device has caught up or not, and holds poison.
Host memory that a copy has touched is followed too, but for what reads it by its address: of such
only ``tolist``, the library's checksums and its files are seen, not ``numpy`` or ``torch.save``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from simulation.imitated.accelerator import DeviceModule
from tests.fcdp.accelerator.tape import Block, Clock, Tape, Timeline, Touch, made_by, region

NAME = "taped"
#: CUDA's allocator gives out multiples of this.
_GRANULE = 512
_POISON = 0xFF

aten = torch.ops.aten
#: They make memory and write nothing.
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
#: Their second argument is a list of indices.
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
#: They read nothing of what they write to.
_FILLS = ("copy_", "fill_", "zero_", "uniform_", "normal_", "_foreach_copy_", "_foreach_zero_")


class Event:
    """A point of a stream."""

    def __init__(self, **_: Any) -> None:
        self._clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self._clock = dict((stream or here().current).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or here().current).wait_event(self)

    def synchronize(self) -> None:
        here().host.wait_for(self._clock)

    def query(self) -> bool:
        """Whether the host sees the event as done: drawn, where it may be either."""
        host = here().host
        known = all(t is host or host.clock.get(t, 0) >= n for t, n in self._clock.items())
        if not known and here().chance.random() < 0.5:
            return False
        self.synchronize()
        return True


class Stream(Timeline):
    #: What FSDP2 of torch 2.15 hands to an operation that does nothing here.
    stream_id = device_index = device_type = 0

    def __init__(self, priority: int = 0, *, device: Device | None = None) -> None:
        device = device or here()
        super().__init__(f"stream '{made_by()}' of rank {device.rank}")
        device.tape.timelines.append(self)

    def is_capturing(self) -> bool:
        """Whether a graph is being captured, as optimizers of torch 2.15 ask."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.wait_for(event._clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_for(other.clock)

    def synchronize(self) -> None:
        here().host.wait_for(self.clock)


@dataclass(eq=False)
class _Storage:
    """Memory of one storage, for as long as that lives."""

    block: Block
    bytes: np.ndarray
    end: Any
    #: The stream that it goes back to; ``None``: of the host.
    home: Stream | None


class Device:
    """One rank's accelerator, and the thread of the host that drives it."""

    def __init__(self, rank: int, tape: Tape, seed: int) -> None:
        self.rank = rank
        self.tape = tape
        self.chance = random.Random(seed * 1000 + rank)
        self.host = tape.timeline(f"the host of rank {rank}")
        self.current = self.compute = Stream(device=self)
        self.compute.name = f"the computing stream of rank {rank}"
        #: Device memory taken so far, in use or free.
        self.reserved_bytes = 0
        #: State that the library keeps per device and process.
        self.state: dict[Any, torch.Tensor] = {}
        self._storages: dict[int, _Storage] = {}
        self._free: dict[Stream, list[Block]] = defaultdict(list)
        self._blocks = 0

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def thread(self, name: str) -> Iterator[Timeline]:
        """Act as another thread of the host, started now."""
        before, self.host = self.host, self.tape.timeline(f"{name} of rank {self.rank}")
        self.host.wait_for(before.clock)
        try:
            yield self.host
        finally:
            self.host = before

    # Memory

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Give a new storage memory on the current stream."""
        block = self._take(storage.nbytes(), self.current)
        self._follow(storage, block, self.current)

    def _take(self, nbytes: int, stream: Stream) -> Block:
        size = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
        free = self._free[stream]
        fitting = [block for block in free if size <= block.nbytes <= 2 * size]
        if fitting:
            block = min(reversed(fitting), key=lambda block: block.nbytes)
            free.remove(block)
            return block
        self._blocks += 1
        self.reserved_bytes += size
        return Block(f"block {self._blocks} of rank {self.rank}", size)

    def _follow(self, storage: torch.UntypedStorage, block: Block, home: Stream | None) -> None:
        key = storage._cdata
        end = weakref.ref(storage, lambda _: self._let_go(key))
        self._storages[key] = _Storage(block, _bytes_of(storage), end, home)

    def _let_go(self, key: int) -> None:
        storage = self._storages.pop(key)
        if storage.home is not None:
            self._free[storage.home].append(storage.block)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage of the device has been freed, or given memory anew, by ``resize_``."""
        self._let_go(storage._cdata)
        if storage.nbytes():
            storage_bytes = _bytes_of(storage)
            storage_bytes[:] = _POISON
            self.adopt(storage)
        else:
            # Nothing is held until it grows again, but its end is to be known.
            self._follow(storage, Block("no memory", 0), None)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._storages

    def touch(self, tensor: torch.Tensor) -> Touch | None:
        """Bytes of ``tensor``, plain or of the device, for an operation on it; ``None``: none."""
        if not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:  # of the host
            name = f"host memory {len(self._storages)} of rank {self.rank}"
            self._follow(storage, Block(name, storage.nbytes()), None)
        held = self._storages[storage._cdata]
        where = region(
            tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.itemsize
        )
        return Touch(held.block, where, held.bytes[where.index].tobytes())

    def touches(self, tensors: Iterable[torch.Tensor]) -> list[Touch]:
        return [touch for tensor in tensors if (touch := self.touch(tensor)) is not None]

    # Operations

    def note(
        self,
        what: str,
        reads: list[Touch],
        writes: Iterable[torch.Tensor],
        *,
        stream: Timeline | None = None,
    ) -> None:
        """Note an operation that has run, on the current stream or on ``stream``."""
        stream = stream or self.current
        stream.wait_for(self.host.clock)
        self.tape.note(stream, what, reads, self.touches(writes))

    def followed(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """List tensors of the host that copies touch too."""
        return [tensor for tensor in tensors if self.holds(tensor.untyped_storage())]

    def note_on_host(
        self, what: str, reads: list[Touch], writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Note what the host's thread has done to memory that copies touch too."""
        written = self.followed(writes)
        if reads or written:
            self.note(what, reads, written, stream=self.host)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    """The storage's memory, which this does not keep alive."""
    if not storage.nbytes():
        return np.empty(0, dtype=np.uint8)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memory, dtype=np.uint8)


_threads = threading.local()


def here() -> Device:
    """The device of the rank that this thread is."""
    return _threads.device


class DeviceTensor(torch.Tensor):
    """A tensor of the accelerator: geometry and memory of a plain one, and another device."""

    @staticmethod
    def over(plain: torch.Tensor) -> DeviceTensor:
        return torch.Tensor._make_subclass(
            DeviceTensor, plain, False, dispatch_device=True, device_for_backend_keys=_device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        made = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, as a result of a rank."""
        with torch._C._DisableTorchDispatch():
            return plain(self).clone().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented if _others(types) else _run(func, args, kwargs or {})


def _others(types: Any) -> bool:
    """Whether there is a subclass with tensors inside it, whose operations come here too."""
    return any(each is not torch.Tensor and each is not DeviceTensor for each in types)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a tensor of the CPU, which the tape does not see."""
    made = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return made.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class Noting(TorchDispatchMode):
    """Sees what makes tensors, and what the host does to memory that copies touch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # DTensor asks for shapes
        return NotImplemented if _others(types) else _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is torch.ops.prim.device.default:
        return _device
    if func in REPLACED:
        return REPLACED[func](*args, **kwargs)
    if torch.is_inference_mode_enabled():  # its tensors cannot be made into others
        with torch.inference_mode(False), torch.no_grad():
            parts = func.decompose(*args, **kwargs)  # nor has autograd taken it apart
            return _run(func, args, kwargs) if parts is NotImplemented else parts
    tensors = _tensors((args, kwargs))
    to = kwargs.get("device")
    to = None if to is None else torch.device(to).type
    on_device = [isinstance(each, DeviceTensor) for each in tensors]
    device = here()
    if not any(on_device) and to != NAME:
        read, written = _split(func, args, kwargs)
        reads = device.touches(device.followed(read))  # before they are changed in place
        result = func(*args, **kwargs)
        if (written or not _is_view(result, tensors)) and func.overloadpacket is not aten.set_:
            device.note_on_host(_name(func), reads, written)
        return result
    if func is aten._foreach_copy_.default and not all(on_device):
        for target, source in zip(*args[:2], strict=True):  # as CUDA has it between devices
            target.copy_(source, *args[2:], **kwargs)
        return args[0]
    if func.overloadpacket in _INDEXING:
        args = (args[0], [_index(each) for each in args[1]], *args[2:])
        tensors = _tensors((args, kwargs))
    known = func.namespace == "aten" and func.overloadpacket is not aten.set_
    assert known, f"{func}: what it touches is not known"
    crosses = func in (aten.copy_.default, aten._to_copy.default)
    if not crosses and func not in _EMPTY:
        for each in tensors:
            if not isinstance(each, DeviceTensor) and each.ndim and each.numel():
                raise RuntimeError(f"{func}: expected all tensors on one device, got cpu too")
    read, written = _split(func, args, kwargs)
    reads = device.touches(read)
    # The same memory, by the tensors that the operation was given.
    aliases = {id(each): plain(each) for each in tensors if isinstance(each, DeviceTensor)}
    owners = {id(aliases[id(each)]): each for each in tensors if id(each) in aliases}
    plain_args, plain_kwargs = _map(lambda each: aliases.get(id(each), each), (args, kwargs))
    if to == NAME:
        plain_kwargs["device"] = torch.device("cpu")
    if func is aten._to_copy.default:
        plain_result = _copied(plain_args[0], plain_kwargs)
    else:
        plain_result = func(*plain_args, **plain_kwargs)
    to_host = to == "cpu" and func is aten._to_copy.default
    made, known = [], True

    def owned(result: Any) -> Any:
        nonlocal known
        if result is None:
            return None
        if not isinstance(result, torch.Tensor):
            known = False  # a number, which the host has to wait for
            return result
        if id(result) in owners:
            return owners[id(result)]
        if to_host or (func is aten.copy_.default and result is args[0]):
            made.append(result)
            return result
        if not device.holds(result.untyped_storage()):
            device.adopt(result.untyped_storage())
            made.append(result)
        return DeviceTensor.over(result)

    results = _map(owned, plain_result)
    if func in _EMPTY:
        for result in made:
            _bytes_of(result.untyped_storage())[:] = _POISON
        return results
    if made or written or not known:
        device.note(_name(func), reads, [*written, *made])
    if not known or (crosses and _blocks(func, args, kwargs, to_host)):
        device.host.wait_for(device.current.clock)
    return results


def _index(index: torch.Tensor | None) -> torch.Tensor | None:
    """An index for a tensor of the device; CUDA copies one that is on the host."""
    if index is None or isinstance(index, DeviceTensor):
        return index
    return _run(aten._to_copy.default, (index,), {"device": _device})


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what lists, tuples and dicts hold; PyTorch's own takes most of an operation's time."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, each) for each in value])
    if isinstance(value, dict):
        return {name: _map(change, each) for name, each in value.items()}
    return change(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves: list[Any] = []
    _map(leaves.append, value)
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def _is_view(result: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether an operation that writes nothing has made tensors of memory that it was given."""
    storages = {each.untyped_storage()._cdata for each in inputs}
    made = _tensors(result)
    return bool(made) and all(each.untyped_storage()._cdata in storages for each in made)


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _copied(tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """``aten._to_copy`` into memory of its own, to wherever it is asked for."""
    options = {name: value for name, value in options.items() if name != "device"}
    options.pop("non_blocking", None)
    return aten._to_copy.default(tensor, **options)


def _blocks(func: Any, args: Any, kwargs: Any, to_host: bool) -> bool:
    """Whether the host waits for a copy: between it and the device, unless told otherwise."""
    if func is aten._to_copy.default:
        between = to_host or not isinstance(args[0], DeviceTensor)
        return between and not kwargs.get("non_blocking", False)
    between = isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
    return between and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _split(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sort an operation's arguments into those that it reads and those that it writes."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for place, (name, reads, writes) in enumerate(_arguments(func)):
        if name in kwargs:
            value = kwargs[name]
        elif place < len(args):
            value = args[place]
        else:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        if writes:
            written += tensors
        if reads:
            read += tensors
    return read, written


@functools.cache  # of schemas, which C++ holds, each question takes long
def _arguments(func: Any) -> list[tuple[str, bool, bool]]:
    """Names of an operation's arguments, and whether it reads them and writes them."""
    name = func._schema.name.removeprefix("aten::")
    unread = name.endswith("_like") or name.startswith("new_")  # they look at shapes alone
    accesses = []
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        filled = writes and (name in _FILLS or argument.kwarg_only)  # ``out`` is only written
        reads = not (filled or unread)
        accesses.append((argument.name, reads, writes))
    return accesses


def _chunk_cat_of_dtypes(
    tensors: list[torch.Tensor], dim: int, num_chunks: int, *, out: torch.Tensor
) -> None:
    """``fsdp::chunk_cat_mixed_dtype``: gradients of several dtypes are cast as they are copied."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.to(out.dtype) for tensor in tensors]
    torch._chunk_cat(tensors, dim, num_chunks, out=out)


def _set(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``aten.set_``; of the device, to what a tensor is already, as parametrizations call it."""
    if not isinstance(tensor, DeviceTensor):
        return aten.set_.source_Tensor(tensor, source)
    mine, its = (
        (each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride())
        for each in (tensor, source)
    )
    assert mine == its, "set_: memory of another tensor is not followed"
    return tensor


#: Operations that are others: by the group of ranks, or of operations that come here themselves.
REPLACED: dict[Any, Callable[..., Any]] = {
    # All memory of the host is as if page-locked: no copy waits but those that are told to.
    aten.is_pinned.default: lambda *_: True,
    aten._pin_memory.default: lambda tensor, *_: tensor,
    aten.set_.source_Tensor: _set,
    torch.ops.fsdp.all_gather_copy_in.default: _fsdp_collectives.all_gather_copy_in_cuda,
    torch.ops.fsdp.split_with_sizes_copy.default: _fsdp_collectives.split_with_sizes_copy,
    torch.ops.fsdp.chunk_cat.default: _fsdp_collectives.chunk_cat,
}
if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):  # from torch 2.15 on
    REPLACED |= {
        torch.ops.fsdp.chunk_cat_mixed_dtype.default: _chunk_cat_of_dtypes,
        # For devices on which memory is given back by themselves: CUDA does nothing, nor does this.
        torch.ops.fsdp.record_grad_output_stream.default: lambda *_: None,
    }


class _Module(DeviceModule):
    """The device, as the rank sees it whose thread asks."""

    Stream = Stream
    Event = Event

    def current_stream(self, device: Any = None) -> Stream:
        return here().current

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return here().stream(stream)

    def synchronize(self, device: Any = None) -> None:
        for timeline in here().tape.timelines:
            if isinstance(timeline, Stream) and timeline.name.endswith(f"rank {here().rank}"):
                timeline.synchronize()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 2**40, 2**40

    def memory_allocated(self, device: Any = None) -> int:
        return here().reserved_bytes

    memory_reserved = max_memory_allocated = memory_allocated


_setup_privateuseone_for_python_backend(NAME, _Module(NAME))
_device = torch.device(NAME, 0)
_resize = torch.UntypedStorage.resize_
_tolist = torch.Tensor.tolist


def read_by_address(what: str, tensor: torch.Tensor) -> None:
    """Note that the host is about to read memory by other means than an operation."""
    here().note_on_host(what, here().touches(here().followed([tensor])))


def _resize_noted(storage: torch.UntypedStorage, size: int) -> None:
    ours = hasattr(_threads, "device") and here().holds(storage)
    _resize(storage, size)
    if ours:
        here().resized(storage)


def _tolist_noted(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DeviceTensor):
        return _tolist(tensor.cpu())
    if hasattr(_threads, "device") and type(tensor) is torch.Tensor:
        read_by_address("tolist", tensor)
    return _tolist(tensor)


# No operation tells of these: FSDP2 frees gathered parameters by the one, hosts read by the next.
torch.UntypedStorage.resize_ = _resize_noted  # type: ignore[method-assign, assignment]
torch.Tensor.tolist = _tolist_noted  # type: ignore[method-assign]


@contextlib.contextmanager
def driving(device: Device) -> Iterator[None]:
    """Make this thread the one that drives ``device``."""
    _threads.device = device
    # ``torch.tensor`` copies its data where the mode sees it, as for fake tensors.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # Whatever does not name a device is on the accelerator.
        with torch.autograd.set_multithreading_enabled(False), Noting(), torch.device(_device):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        del _threads.device
