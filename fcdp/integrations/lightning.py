"""Strategies for Lightning's Trainer and for Fabric that shard by ``fcdp.shard``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.fabric.strategies.model_parallel as of_fabric
import lightning.pytorch.strategies.model_parallel as of_trainer
import torch.nn as nn
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from fcdp.api import accumulate, shard
from fcdp.arguments import policy_of
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.integrations.takeover import check_options, check_version, topology_over
from fcdp.topology import Topology

#: Methods that Lightning calls of a module, each a forward by itself.
_FORWARDS = ("training_step", "validation_step", "test_step", "predict_step")

_Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


class _Sharding:
    """Sharding of a module, shared by the strategies of Fabric and of the Trainer."""

    device_mesh: DeviceMesh
    num_nodes: int
    num_processes: int
    _data_parallel_size: int
    _tensor_parallel_size: int

    def __init__(
        self,
        topology: Topology | None = None,
        policy: CachePolicy | str = HostCache(),
        *theirs: Any,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        check_version("lightning", "2.6")
        check_options(options, theirs=())
        self._topology = topology
        self._policy = policy_of(policy)
        self._options = options
        super().__init__(
            *theirs,  # type: ignore[call-arg]
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )

    def setup_environment(self) -> None:
        """Give tensor parallelism what it asks for, and data parallelism all other ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes // self._tensor_parallel_size
        super().setup_environment()  # type: ignore[misc]

    def _shard(self, module: nn.Module) -> None:
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                raise ValueError(
                    f"model: {name or type(part).__name__} is sharded already; leave fully_shard "
                    "out of configure_model and parallelize_fn, which are for tensor parallelism"
                )
        topology = topology_over(self.device_mesh["data_parallel"], self._topology)
        shard(module, topology, policy=self._policy, **self._options)


class FabricStrategy(_Sharding, of_fabric.ModelParallelStrategy):  # type: ignore[misc]
    """Strategy of ``Fabric``: ``setup_module`` shards, ``no_backward_sync`` accumulates.

    Args:
        topology: Where the data-parallel ranks stand; by default torchrun's environment tells it.
        policy: As of ``fcdp.shard``.
        tensor_parallel_size: As of Lightning's ``ModelParallelStrategy``; the other ranks are
            data-parallel.
        parallelize_fn: As there, for tensor parallelism alone; called before the model is sharded.
        options: ``save_distributed_checkpoint``, as there, and other arguments of ``fcdp.shard``.

    Raises:
        ValueError: For a release of Lightning that is not known, and for arguments that
            ``fcdp.shard`` would refuse; in ``setup_module`` for a model that is sharded already.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        policy: CachePolicy | str = HostCache(),
        *,
        parallelize_fn: _Parallelize | None = None,
        **options: Any,
    ) -> None:
        def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            if parallelize_fn is not None:
                module = parallelize_fn(module, mesh)
            self._shard(module)
            return module

        super().__init__(topology, policy, parallelize, **options)
        self._backward_sync_control = _Accumulating()


class _Accumulating(_BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        return accumulate(module, last=not enabled)


class TrainerStrategy(_Sharding, of_trainer.ModelParallelStrategy):  # type: ignore[misc]
    """Strategy of ``lightning.Trainer``: shards the module after ``configure_model``, if there.

    ``accumulate_grad_batches`` accumulates by ``fcdp.accumulate``.

    Args:
        topology: As of ``FabricStrategy``, as are the other arguments.
        policy: As of ``fcdp.shard``.
        tensor_parallel_size: As of Lightning's ``ModelParallelStrategy``; ``configure_model``
            applies tensor parallelism, over ``self.device_mesh["tensor_parallel"]``.
        options: Other arguments of ``fcdp.shard``.

    Raises:
        ValueError: As ``FabricStrategy``.
    """

    _last = True

    def setup(self, trainer: Any) -> None:
        """Do as ``ModelParallelStrategy``, which casts the module after it was sharded."""
        self.accelerator.setup(trainer)
        module: nn.Module = self.precision_plugin.convert_module(self.lightning_module)
        self._shard(module)
        for name in _FORWARDS:
            register_fsdp_forward_method(module, name)
        _materialize_distributed_module(module, self.root_device)
        self.model = module
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate, as all but the last of several micro-batches do."""
        self._last = False
        try:
            with accumulate(self.model, last=False):
                yield
        finally:
            self._last = True

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Send the sums of earlier micro-batches across nodes with the last one."""
        with accumulate(self.model, last=True) if self._last else contextlib.nullcontext():
            return super().backward(*args, **kwargs)
