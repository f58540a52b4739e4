"""One of the cluster's ranks: its process group sends nothing, its training step is real."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._meta_registrations import create_fakework
from torch.distributed._tools import fake_collectives  # noqa: F401 - gives them fake tensors
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcdp
from baselines import registry
from baselines import strategy as strategies
from baselines.pytorch import fsdp2
from baselines.strategy import Job, Trainable
from fcdp.arena import Arena
from fcdp.engine import has_engine
from fcdp.unit import Unit
from simulation.imitated.records import Case

#: Makes the mesh that ``reshard_after_forward=int`` reshards to.
_POST_FORWARD = "_get_post_forward_mesh_info"
#: Makes a case's model, and says which of its modules are the transformer blocks.
Build = Callable[[Case], tuple[nn.Module, Sequence[nn.Module]]]

_c10d = torch.library.Library("c10d", "IMPL")
for _name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
    # As ``fake_collectives`` has it for the other collectives.
    _c10d.impl(_name, lambda *args: create_fakework(args, return_first_arg=False), "Meta")


class Rank:
    """A rank of the case's cluster, ready to train on ``device_type``.

    Make it with :func:`world` entered, and on the imitated accelerator inside of it.
    """

    def __init__(self, case: Case, device_type: str, build: Build) -> None:
        self.case = case
        self._device = torch.device(device_type)
        self.model, blocks = build(case)
        _move(self.model, self._device)
        self.parameters = sum(param.numel() for param in self.model.parameters())
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        if case.checkpointing:  # keep of each block only its input
            apply_activation_checkpointing(self.model, check_fn={*blocks}.__contains__)
            blocks = [m for m in self.model.modules() if isinstance(m, CheckpointWrapper)]
        self.trainable: Trainable = strategies.load(case.strategy)(
            self.model,
            Job(
                topology=_topology(case.nodes, case.ranks_per_node, device_type),
                blocks=blocks,
                dtype=torch.bfloat16,
                learning_rate=1e-4,
                micro_batch=1,
                accumulation=case.accumulation,
                settings=registry.find(case.strategy).chosen(case.settings),
            ),
        )

    def step(self, micro_batch: int) -> None:
        """Train one step that, like the first, gathers everything across nodes."""
        if has_engine(self.model):
            fcdp.invalidate(self.model)
        shape = (micro_batch, self.case.sequence_length + 1)
        batch = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.trainable.step([batch] * self.case.accumulation)


@contextlib.contextmanager
def world(size: int, device_type: str, rank: int = 0) -> Iterator[None]:
    """A process group of ``size`` ranks, of which only one exists: this process."""
    backends = f"cpu:fake,{device_type}:fake"
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=size)
    try:
        with contextlib.ExitStack() as patches:
            for owner, name in ((fsdp2, "init_device_mesh"), (_fsdp_init, _POST_FORWARD)):
                made = _with_contents(getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, made))
            for module in ("agreement", "cache.memory_plan", "pass_controller"):
                # Other ranks agree with this one.
                patches.enter_context(
                    mock.patch(f"fcdp.{module}.any_rank", lambda flags, topology: list(flags))
                )
            patches.enter_context(mock.patch("fcdp.engine.Guard", _Unguarded))
            yield
    finally:
        dist.destroy_process_group()


class _Unguarded:
    """Stands in for the guard, whose checksums would be of tensors without contents."""

    detects = False

    def __init__(self, units: Sequence[Unit], *others: Any, **options: Any) -> None:
        self._units = units

    def remember(self, unit: Unit, shard: torch.Tensor) -> None:
        pass

    def compare(self, unit: Unit, shard: torch.Tensor) -> None:
        pass

    def poll(self) -> list[bool]:
        return [False] * len(self._units)


def _with_contents(make_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """``make_mesh`` with real tensors: a mesh reads its ranks, which fake ones do not hold."""

    @functools.wraps(make_mesh)
    def make(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make_mesh(*args, **kwargs)

    return make


@contextlib.contextmanager
def imitated_host() -> Iterator[None]:
    """Host memory without contents, as much as is asked for."""
    with (
        mock.patch("fcdp.cache.tiers.Arena", _FakeArena),
        mock.patch("fcdp.partial_gradients.Arena", _FakeArena),
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=None),
        mock.patch("fcdp.cache.memory_plan.MemoryPlan.announce"),
    ):
        yield


class _FakeArena(Arena):
    """An arena of a fake tensor, which has no address to align and to register."""

    def __init__(self, nbytes: int, device: torch.device, *, poison: bool = False) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self._taken = 0


def _move(model: nn.Module, device: torch.device) -> None:
    """``model.to(device)``, for devices between which a parameter cannot stay the same object."""
    moved: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param not in moved:
                moved[param] = nn.Parameter(param.detach().to(device), param.requires_grad)
            module._parameters[name] = None if param is None else moved[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _topology(nodes: int, ranks_per_node: int, device_type: str) -> fcdp.Topology:
    """The topology as ``Topology.build`` makes it, without asking other ranks."""
    make = _with_contents(init_device_mesh)
    grid = make(device_type, (nodes, ranks_per_node), mesh_dim_names=("inter", "intra"))
    return over(make(device_type, (nodes * ranks_per_node,), mesh_dim_names=("shard",)), grid)


def over(mesh: DeviceMesh, grid: DeviceMesh) -> fcdp.Topology:
    """The topology of a mesh, without asking other ranks: there are none.

    ``grid`` has its nodes as the dimension "inter", and their ranks as "intra".
    """
    intra, inter = grid.get_group("intra"), grid.get_group("inter")
    return fcdp.Topology(
        nodes=inter.size(),
        ranks_per_node=intra.size(),
        rank=mesh.get_local_rank(),
        mesh=mesh,
        intra=intra,
        inter=inter,
        reduce_intra=intra,
        reduce_inter=inter,
        control_intra=intra,
        control_inter=inter,
    )
