"""accelerate, the Trainer of transformers and TRL's trainers, sharded by ``fcdp.shard``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import accelerate.accelerator
import torch
import torch.distributed.fsdp
import torch.nn as nn
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from fcdp.api import invalidate
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.integrations.takeover import Takeover, check_version, replace, replace_in
from fcdp.topology import Topology

#: What takes the last call of ``use`` back.
_in_use = contextlib.ExitStack()


def use(
    topology: Topology | None = None, policy: CachePolicy | str = HostCache(), **options: Any
) -> contextlib.ExitStack:
    """Have accelerate shard by ``fcdp.shard`` wherever it would by ``fully_shard`` (FSDP2).

    Call it on every rank before the trainer, or the ``Accelerator``, is made. It goes for all that
    are made in this process from then on, until it is called again. accelerate's FSDP plugin (the
    Trainer's ``fsdp_config``) says what it says without FCDP: which classes are units, mixed
    precision, CPU offload, RAM-efficient loading, activation checkpointing, ignored modules,
    ``reshard_after_forward``. Adapters are split from frozen weights; micro-batches accumulate by
    ``fcdp.accumulate``; TRL's reference models are sharded block by block, and ``sync_ref_model``
    is told to the cache. On CPUs it has accelerate take its FSDP plugin, which it else does on
    accelerators only.

    Args:
        topology: Where the ranks stand; by default the mesh of accelerate's ``ParallelismConfig``
            tells it, or torchrun's environment.
        policy: As of ``fcdp.shard``.
        options: Other arguments of ``fcdp.shard`` that the plugin does not stand for, such as
            ``gather_codec``.

    Returns:
        What takes it back: ``close()`` it, or use it in ``with``.

    Raises:
        ValueError: For a release of accelerate or TRL that is not known, and for arguments that
            ``fcdp.shard`` would refuse; when a model is prepared, where the plugin asks for what
            FCDP cannot do, with the option to change.
    """
    check_version("accelerate", "1.15")
    if find_spec("trl"):
        check_version("trl", "1.16")
    takeover = Takeover(topology, policy, options)
    _in_use.close()
    with contextlib.ExitStack() as stack:
        _take_accelerate(stack, takeover)
        if find_spec("trl"):
            _take_trl(stack, takeover)
        _in_use.push(stack.pop_all())
    return _in_use


def _take_accelerate(stack: contextlib.ExitStack, takeover: Takeover) -> None:
    shard, prepare = accelerate.accelerator.fsdp2_prepare_model, Accelerator.prepare
    no_sync, backward, init = Accelerator.no_sync, Accelerator.backward, AcceleratorState.__init__
    deferring: set[nn.Module] = set()

    @functools.wraps(init)
    def init_here(self: AcceleratorState, *args: Any, **given: Any) -> None:
        init(self, *args, **given)
        if given.get("_from_accelerator"):
            _check_plugin(self, given.get("fsdp_plugin"))
            _allow_cpus(self, given["fsdp_plugin"])

    @functools.wraps(prepare)
    def prepare_here(self: Accelerator, *args: Any, **given: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module) and not takeover.has(model):
                _check_plain(model)
        return prepare(self, *args, **given)

    @functools.wraps(shard)
    def shard_here(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        with takeover.of(model, torch.distributed.fsdp):
            sharded: nn.Module = shard(accelerator, model)
        return sharded

    @functools.wraps(no_sync)
    @contextlib.contextmanager
    def no_sync_here(self: Accelerator, model: nn.Module) -> Iterator[None]:
        if not takeover.has(model):
            with no_sync(self, model):
                yield
            return
        deferring.add(model)
        try:
            with takeover.accumulating(model, last=False):
                yield
        finally:
            deferring.discard(model)

    @functools.wraps(backward)
    def backward_here(self: Accelerator, loss: Any, **given: Any) -> None:
        with contextlib.ExitStack() as models:
            for model in self._models:
                if model not in deferring:
                    models.enter_context(takeover.accumulating(model, last=True))
            backward(self, loss, **given)

    replace(stack, AcceleratorState, "__init__", init_here)
    replace(stack, Accelerator, "prepare", prepare_here)
    replace(stack, Accelerator, "no_sync", no_sync_here)
    replace(stack, Accelerator, "backward", backward_here)
    replace_in(stack, "accelerate", shard, shard_here)


def _check_plugin(state: AcceleratorState, plugin: Any) -> None:
    """Raise ``ValueError`` where accelerate is not asked for FSDP2."""
    if plugin is None:
        raise ValueError(
            f"fsdp_plugin = None: accelerate would train with {state.distributed_type.value}; must "
            "be FullyShardedDataParallelPlugin(fsdp_version=2), by the Trainer's arguments "
            "fsdp=True, fsdp_config={'version': 2}"
        )
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version = {plugin.fsdp_version}: must be 2, by the Trainer's arguments "
            "fsdp_config={'version': 2}"
        )


def _allow_cpus(state: AcceleratorState, plugin: Any) -> None:
    """What accelerate itself does with the plugin on accelerators."""
    if state.distributed_type == DistributedType.MULTI_CPU:
        if state._mixed_precision != "no":
            plugin.set_mixed_precision(state._mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _check_plain(model: nn.Module) -> None:
    """Raise ``ValueError`` for a model that somebody else has wrapped."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel | DistributedDataParallel):
            raise ValueError(
                f"model: {name or type(module).__name__} is wrapped or sharded already; pass the "
                "model as from_pretrained makes it (without distributed_config, fully_shard and "
                "fcdp.shard), which accelerate's FSDP plugin then shards by fcdp.shard"
            )


def _take_trl(stack: contextlib.ExitStack, takeover: Takeover) -> None:
    from trl.models import utils  # TRL is there or not
    from trl.trainer.callbacks import SyncRefModelCallback

    prepare, sync = utils.prepare_fsdp, SyncRefModelCallback.sync_target_model

    @functools.wraps(prepare)
    def prepare_here(model: nn.Module, accelerator: Accelerator) -> nn.Module:
        with takeover.of(model, torch.distributed.fsdp):
            prepared: nn.Module = prepare(model, accelerator)
        return prepared

    @functools.wraps(sync)
    def sync_here(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        sync(model, target_model, alpha)
        if takeover.has(target_model):
            invalidate(target_model)  # it writes through ``.data``

    replace_in(stack, "trl", prepare, prepare_here)
    replace(stack, SyncRefModelCallback, "sync_target_model", staticmethod(sync_here))
