"""An accelerator that is imitated: its tensors have shapes and no contents, its bytes are counted.

PyTorch takes it for a device of its own (``imitated:0``), apart from the CPU: engines choose the
paths that they take on CUDA, with streams, staging buffers and copies to and from the host. Tensors
are fake ones. Counted are the storages that the program keeps alive, in the allocator's blocks of
512 bytes; fragmentation, and memory that a stream still holds after it was freed, are not.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "imitated"
#: CUDA's allocator gives out multiples of this.
_BLOCK = 512


class Allocations(TorchDispatchMode):
    """Counts the bytes, by device type, of storages that operations made and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Bytes alive now, and at most since ``reset_peak``, by device type.
        self.current: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        #: Device type, bytes and a weak reference of each live storage, by its address.
        self._alive: dict[int, tuple[str, int, weakref.ref[torch.UntypedStorage]]] = {}

    def reset_peak(self) -> None:
        """Let peaks begin anew at what is alive now."""
        self.peak = defaultdict(int, self.current)

    def __enter__(self) -> Allocations:
        resize = torch.UntypedStorage.resize_

        def counted_resize(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._alive:
                device, _, end = self._alive[storage._cdata]
                self._set(storage._cdata, device, _blocks(storage), end)

        # FSDP2 frees gathered parameters by it, and it is no dispatched operation.
        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", counted_resize)
        self._resize.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resize.stop()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation is not torch.ops.prim.device.default:
            self._count(result)
        return result

    def _count(self, result: object) -> None:
        if isinstance(result, DTensor):
            self._count(result._local_tensor)
        elif isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                end = weakref.ref(storage, lambda _: self._forget(key))
                self._set(key, result.device.type, _blocks(storage), end)
        elif isinstance(result, (list, tuple)):
            for part in result:
                self._count(part)

    def _set(
        self, key: int, device: str, size: int, end: weakref.ref[torch.UntypedStorage]
    ) -> None:
        before = self._alive[key][1] if key in self._alive else 0
        self._alive[key] = (device, size, end)
        self.current[device] += size - before
        self.peak[device] = max(self.peak[device], self.current[device])

    def _forget(self, key: int) -> None:
        device, size, _ = self._alive.pop(key)
        self.current[device] -= size


def _blocks(storage: torch.UntypedStorage) -> int:
    return -(-storage.size() // _BLOCK) * _BLOCK


def _always(answer: Any = None) -> Callable[..., Any]:
    """A method that only returns ``answer``: everything runs at once and in order."""
    return lambda *_, **__: answer


class _Event:
    def __init__(self, **options: Any) -> None: ...

    record = wait = synchronize = _always()
    query = _always(True)


class _Stream:
    def __init__(self, priority: int = 0) -> None:
        self.stream_id = 0

    wait_stream = wait_event = synchronize = _always()

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


class DeviceModule(ModuleType):
    """The module of a device type in Python, as ``torch.cuda`` is CUDA's; it has one device."""

    manual_seed_all = set_device = _always()
    is_initialized = is_available = _always(True)
    _is_in_bad_fork = _always(False)
    device_count = _always(1)
    current_device = _always(0)
    get_amp_supported_dtype = _always([torch.bfloat16, torch.float16])


class _Device(DeviceModule):
    Stream = _Stream
    Event = _Event
    synchronize = _always()
    #: The one stream, on which all is queued.
    current_stream = _always(_Stream())
    stream = _always(contextlib.nullcontext())

    def __init__(self) -> None:
        super().__init__(NAME)
        self.allocations = Allocations()
        #: Bytes of the device's memory.
        self.total = 0

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.memory_allocated(), self.total

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocations.current[NAME]

    def memory_reserved(self, device: Any = None) -> int:
        return self.memory_allocated()

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.allocations.peak[NAME]


_device = _Device()
_set_up = cache(partial(_setup_privateuseone_for_python_backend, NAME, _device))


@contextlib.contextmanager
def imitated(total_bytes: int) -> Iterator[Allocations]:
    """Give this process the accelerator, of so much memory; tensors made inside are fake.

    Once a process has it, it stays known to PyTorch.
    """
    _set_up()
    # FSDP2's gather asks for addresses, to see whether two tensors are one.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    _device.allocations, _device.total = Allocations(), total_bytes
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _device.allocations as allocations,
        mock.patch("torch.nn.functional.scaled_dot_product_attention", _flash_attention),
        mock.patch("torch.accelerator.current_stream", _device.current_stream),
        # Calls that fake tensors do not support. Modules are already on their device.
        mock.patch("torch.Tensor.record_stream"),
        mock.patch("torch.Tensor.pin_memory", _itself),
        mock.patch("torch.nn.Module.to", _itself),
        # Reads positions, which fake tensors do not have, to see whether a mask is needed.
        mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None),
    ):
        yield allocations


def _itself(this: Any, *target: Any, **options: Any) -> Any:
    return this


def _flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Call the kernel that PyTorch chooses on CUDA for these inputs.

    A device that PyTorch does not know gets attention by matrix products, which takes far more
    memory.
    """
    assert attn_mask is None, "CUDA's flash attention takes no mask"
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )[0]
    return output
