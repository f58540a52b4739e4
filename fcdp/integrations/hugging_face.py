"""accelerate, the Trainer of transformers and TRL's trainers, sharded by ``fcdp.shard``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import accelerate.accelerator
import torch.distributed.fsdp
import torch.nn as nn
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fcdp.api import accumulate, invalidate
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.integrations.takeover import Takeover, check_version, replace_in
from fcdp.topology import Topology

_takeover = Takeover()
#: Models whose gradients wait for a later micro-batch.
_deferring: set[nn.Module] = set()


def use(
    topology: Topology | None = None, policy: CachePolicy | str = HostCache(), **options: Any
) -> contextlib.ExitStack:
    """Make accelerate call ``fcdp.shard`` wherever it would call ``fully_shard`` (FSDP2).

    Call it on every rank before the trainer, or the ``Accelerator``, is made. It goes for all that
    are made in this process from then on. accelerate's FSDP plugin (the Trainer's ``fsdp_config``)
    means what it means without FCDP: which classes are units, mixed precision, CPU offload,
    RAM-efficient loading, activation checkpointing, ignored modules, ``reshard_after_forward``.
    Adapters are split from frozen weights, micro-batches accumulate by ``fcdp.accumulate``, TRL's
    reference models are sharded block by block, and the cache learns of ``sync_ref_model``. On
    CPUs it has accelerate take the plugin, which otherwise counts on accelerators only.

    Args:
        topology: Where the ranks stand; by default the mesh of accelerate's ``ParallelismConfig``
            tells it, or torchrun's environment.
        policy: As of ``fcdp.shard``.
        options: ``cache`` and ``comm``, as of ``fcdp.shard``.

    Returns:
        A context that ends it: ``close()`` it, or use it in ``with``.

    Raises:
        ValueError: For a release of accelerate or TRL that is not known, and for arguments that
            ``fcdp.shard`` would refuse. Later, where the trainer's settings or the model do not
            allow it, with the option to change.
    """
    check_version("accelerate", "1.15")
    has_trl = find_spec("trl") is not None
    if has_trl:
        check_version("trl", "1.16")
    end = _takeover.use(topology, policy, options)
    _replace_accelerate()
    if has_trl:
        _replace_trl()
    return end


@functools.cache
def _replace_accelerate() -> None:
    """Replace accelerate's functions, once, by those that look at ``_takeover``."""
    init, prepare = AcceleratorState.__init__, Accelerator.prepare
    no_sync, backward = Accelerator.no_sync, Accelerator.backward
    shard = accelerate.accelerator.fsdp2_prepare_model

    @functools.wraps(init)
    def init_here(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _takeover.in_use and kwargs.get("_from_accelerator"):
            _check_plugin(self, kwargs.get("fsdp_plugin"))
            allow_cpus(self, kwargs["fsdp_plugin"])

    @functools.wraps(prepare)
    def prepare_here(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        for model in args:
            if _takeover.in_use and isinstance(model, nn.Module):
                _check_plain(model)
                _check_plugin(self.state, getattr(self.state, "fsdp_plugin", None))
        return prepare(self, *args, **kwargs)

    @functools.wraps(shard)
    def shard_here(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        # Both accelerate and TRL import ``fully_shard`` from there at each call.
        with _takeover.of(model, torch.distributed.fsdp):
            sharded: nn.Module = shard(accelerator, model)
        return sharded

    @functools.wraps(no_sync)
    @contextlib.contextmanager
    def no_sync_here(self: Accelerator, model: nn.Module) -> Iterator[None]:
        if model not in _takeover.models:
            with no_sync(self, model):
                yield
            return
        _deferring.add(model)
        try:
            with accumulate(model, last=False):
                yield
        finally:
            _deferring.discard(model)

    @functools.wraps(backward)
    def backward_here(self: Accelerator, loss: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as models:
            for model in self._models:
                if model in _takeover.models and model not in _deferring:
                    models.enter_context(accumulate(model, last=True))
            backward(self, loss, **kwargs)

    AcceleratorState.__init__ = init_here
    Accelerator.prepare, Accelerator.no_sync = prepare_here, no_sync_here
    Accelerator.backward = backward_here
    replace_in("accelerate", shard, shard_here)


@functools.cache
def _replace_trl() -> None:
    """Replace TRL's functions, once, as ``_replace_accelerate`` does."""
    prepare = import_module("trl.models.utils").prepare_fsdp
    callback = import_module("trl.trainer.callbacks").SyncRefModelCallback
    sync = callback.sync_target_model

    @functools.wraps(prepare)
    def prepare_here(model: nn.Module, accelerator: Accelerator) -> nn.Module:
        with _takeover.of(model, torch.distributed.fsdp):
            prepared: nn.Module = prepare(model, accelerator)
        return prepared

    @functools.wraps(sync)
    def sync_here(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        sync(model, target_model, alpha)
        if target_model in _takeover.models:
            invalidate(target_model)  # it writes through ``.data``

    replace_in("trl", prepare, prepare_here)
    callback.sync_target_model = staticmethod(sync_here)


def _check_plugin(state: AcceleratorState, plugin: Any) -> None:
    """Raise ``ValueError`` where accelerate is not asked for FSDP2."""
    if plugin is None:
        raise ValueError(
            f"fsdp_plugin = None: accelerate would train by {state.distributed_type.value}; must "
            "be FullyShardedDataParallelPlugin(fsdp_version=2), which the Trainer makes of its "
            "arguments fsdp=True, fsdp_config={'version': 2}, and on CPUs after hugging_face.use"
        )
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version = {plugin.fsdp_version}: must be 2, in the Trainer's arguments "
            "fsdp=True, fsdp_config={'version': 2}"
        )


def allow_cpus(state: AcceleratorState, plugin: Any) -> None:
    """Make accelerate use the plugin on CPUs as it does on accelerators."""
    if state.distributed_type == DistributedType.MULTI_CPU:
        if state._mixed_precision != "no":
            plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _check_plain(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model that somebody else has wrapped."""
    if model in _takeover.models:
        return
    for name, module in model.named_modules():
        sharded = isinstance(module, FSDPModule | FullyShardedDataParallel)
        if sharded or isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"model: {name or type(module).__name__} is sharded or wrapped already; pass it "
                "as from_pretrained makes it, without distributed_config, fully_shard or "
                "fcdp.shard: accelerate's FSDP plugin has it sharded by fcdp.shard; or leave out "
                "hugging_face.use, and call fcdp.cache_parameters(model, topology)"
            )
