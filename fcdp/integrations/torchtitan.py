"""torchtitan's decoders, sharded by ``fcdp.shard``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.fsdp
import torchtitan.distributed.utils
import torchtitan.trainer
from torchtitan.trainer import Trainer

from fcdp.api import accumulate
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.integrations.takeover import Takeover, check_version, replace_in
from fcdp.topology import Topology

_takeover = Takeover()


def use(
    topology: Topology | None = None, policy: CachePolicy | str = HostCache(), **options: Any
) -> contextlib.ExitStack:
    """Make torchtitan call ``fcdp.shard`` for its decoders, where it would call ``fully_shard``.

    Call it on every rank before the ``Trainer`` is built. Its configuration means what it means
    without FCDP: mixed precision, CPU offload, tensor parallelism, activation checkpointing,
    compilation, ``fsdp_reshard_after_forward``. Micro-batches accumulate by ``fcdp.accumulate``.
    With expert parallelism the decoder is sharded by torchtitan itself, over its two meshes, and
    given to ``fcdp.cache_parameters``.

    Args:
        topology: Where the data-parallel ranks stand, with expert parallelism all ranks; by
            default torchtitan's mesh and torchrun's environment tell it.
        policy: As of ``fcdp.shard``.
        options: ``cache`` and ``comm``, as of ``fcdp.shard``.

    Returns:
        A context that ends it: ``close()`` it, or use it in ``with``.

    Raises:
        ValueError: For a release of torchtitan that is not known, and for arguments that
            ``fcdp.shard`` would refuse; where a ``Trainer`` is built for what FCDP cannot do, with
            the option to change.
    """
    check_version("torchtitan", "0.3")
    end = _takeover.use(topology, policy, options)
    _replace()
    return end


@functools.cache
def _replace() -> None:
    """Replace torchtitan's functions, once, by those that look at ``_takeover``."""
    apply = torchtitan.distributed.fsdp.apply_fsdp_to_decoder
    init, train_step = Trainer.__init__, Trainer.train_step
    micro_batch = Trainer.forward_backward_step

    @functools.wraps(apply)
    def apply_here(model: Any, *args: Any, **kwargs: Any) -> None:
        # The chunked loss calls it by itself, outside of the model's forward.
        head = [] if model.enable_weight_tying else [model.lm_head]
        takes = _takeover.as_sharded if kwargs.get("ep_degree", 1) > 1 else _takeover.of
        with takes(model, torchtitan.distributed.fsdp, apart=head):
            apply(model, *args, **kwargs)
        for each in head if model in _takeover.models else []:
            # Not the last block, which each chunk's backward would free without having used it.
            each.set_modules_to_backward_prefetch([each])

    @functools.wraps(init)
    def init_here(self: Trainer, config: Any) -> None:
        if _takeover.in_use:
            _check_configuration(config)
            _allow_cpus()
        init(self, config)
        if _takeover.in_use and not _takeover.models.issuperset(self.model_parts):
            raise ValueError(
                f"model_spec = {config.model_spec.name}: its parallelize_fn shards by itself; must "
                "be of a model whose parallelize_fn calls apply_fsdp_to_decoder"
            )

    @functools.wraps(train_step)
    def train_step_here(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        self._fcdp_micro_batches = 0
        return train_step(self, *args, **kwargs)

    @functools.wraps(micro_batch)
    def micro_batch_here(self: Trainer, **kwargs: Any) -> Any:
        model: nn.Module = self.model_parts[0]
        if model not in _takeover.models:
            return micro_batch(self, **kwargs)
        self._fcdp_micro_batches += 1
        last = self._fcdp_micro_batches == self.gradient_accumulation_steps
        # Not around the last: a decoder uses all its units, and of several backwards, one for each
        # chunk of the loss, the first would have what waits of all of them reduced.
        deferring = contextlib.nullcontext() if last else accumulate(model, last=False)
        with deferring:
            return micro_batch(self, **kwargs)

    if not hasattr(torch.distributed, "set_timeout"):  # 0.3 asks it of a torch after 2.13
        # Process groups keep the timeouts that they were made with.
        torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None
    replace_in("torchtitan", apply, apply_here)
    Trainer.__init__, Trainer.train_step = init_here, train_step_here
    Trainer.forward_backward_step = micro_batch_here
    Trainer._fcdp_micro_batches = 0  # of the step


def _check_configuration(config: Any) -> None:
    """Raise ``ValueError`` for what cannot be cached, with the option to change."""
    of, must = config.parallelism, []
    if of.pipeline_parallel_degree > 1:
        must.append(
            f"parallelism.pipeline_parallel_degree = {of.pipeline_parallel_degree}: must be 1"
        )
    if of.spmd_backend != "partial_dtensor" and (
        of.tensor_parallel_degree > 1 or of.expert_parallel_degree > 1
    ):
        must.append(
            f"parallelism.spmd_backend = {of.spmd_backend!r}: must be 'partial_dtensor' beside "
            "tensor or expert parallelism"
        )
    if of.enable_fsdp_symm_mem:
        must.append("parallelism.enable_fsdp_symm_mem = True: must be False")
    if not config.training.disable_cuda_graphs:  # a replay would repeat the first step's misses
        must.append("training.disable_cuda_graphs = False: must be True")
    if must:
        raise ValueError("; ".join(must))


def _allow_cpus() -> None:
    """Make torchtitan take the CPU where it would take CUDA and there is no GPU."""
    if torch.accelerator.is_available():
        return
    cpu = SimpleNamespace(**vars(torch.cpu))
    cpu.current_device = lambda: 0
    # Functions that torchtitan's metrics ask of an accelerator.
    cpu.get_device_name = lambda device: "CPU"
    cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1)
    cpu.memory_stats = lambda device: defaultdict(int)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    for name, module in [*sys.modules.items()]:
        held = getattr(module, "__dict__", {})
        if name.partition(".")[0] == "torchtitan" and held.get("device_type") == "cuda":
            held.update(device_type="cpu", device_module=cpu)
