"""A unit: one FSDP2 parameter group, which is one gather and one cache entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fcdp.topology import Topology


@dataclass(frozen=True, eq=False)
class Unit:
    """What one gather moves: one FSDP2 parameter group, described once and for all.

    What changes over time is the cache's (:class:`fcdp.cache.entry.Entry`).
    """

    name: str
    module: FSDPModule
    #: FSDP2's ``FSDPParamGroup``.
    group: Any
    #: One rank's part of the gather, in bytes of the gather dtype, padding included.
    shard_bytes: int
    #: Elements of it, padding included.
    shard_numel: int
    #: What they are gathered in; usually one dtype.
    gather_dtypes: frozenset[torch.dtype]
    #: How often a step of one micro-batch gathers it again without it having changed.
    reuses: int = 1

    @property
    def params(self) -> list[DTensor]:
        """Sharded parameters, as the optimizer sees them; FSDP2's, as a load may replace them."""
        return [fsdp_param.sharded_param for fsdp_param in self.group.fsdp_params]

    @property
    def trainable(self) -> bool:
        return any(param.requires_grad for param in self.params)

    @property
    def hooked(self) -> bool:
        """Whether somebody else's code is called with each gradient as soon as it is reduced."""
        return self.group._all_reduce_hook is not None or any(
            getattr(param, "_post_accumulate_grad_hooks", None) for param in self.params
        )

    @property
    def prefetched(self) -> bool:
        """Whether a gather has begun that nobody has waited for."""
        return self.group._all_gather_result is not None

    def shard(self, device: torch.device) -> torch.Tensor:
        """Return what a gather would read of this rank now, as bytes: FSDP2's copy-in."""
        parts = [
            fsdp_param._sharded_param_data.to(device, _gather_dtype(fsdp_param)).view(torch.uint8)
            for fsdp_param in self.group.fsdp_params
        ]
        return torch.cat(parts)

    def stamp(self) -> int:
        """Return a number that grows with each in-place write that autograd sees on this rank.

        Writes through the parameter count on the DTensor, writes through ``to_local()`` on the
        tensor inside. Writes through ``.data``, behind ``detach()``, by ``torch._foreach_*`` on
        DTensors and by fused optimizer kernels do not count at all: see
        :mod:`fcdp.staleness`.
        """
        return sum(param._version + param._local_tensor._version for param in self.params)


def find_units(model: nn.Module, topology: Topology) -> list[Unit]:
    """The units of a model that FSDP2 has sharded, in the order of ``named_modules``.

    Raises ``ValueError`` for a model without FSDP2, one sharded over other ranks than those of
    ``topology`` or replicated too (HSDP), several meshes in one module, an integer as
    ``reshard_after_forward``, and gather extensions.
    """
    units: list[Unit] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in seen:  # fully_shard([a, b]) gives a and b one state
            continue
        seen.add(id(state))
        groups = param_groups(state)
        if len(groups) > 1:
            raise ValueError(
                f"{name or 'model'}: {len(groups)} meshes in one module (shard_placement_fn); "
                "FCDP needs one mesh a module"
            )
        # FSDP2 keeps what the root holds itself gathered, unless told otherwise.
        kept = not name and getattr(state, "_auto_reshard_after_forward", True)
        units += [_unit(name or "root", module, group, topology, kept) for group in groups]
    if not units:
        raise ValueError(
            "model: no module is sharded by FSDP2; call fcdp.shard(model, topology, units=...) "
            "or torch.distributed.fsdp.fully_shard on it first"
        )
    return units


def param_groups(state: Any) -> list[Any]:
    """List the parameter groups of one FSDP2 module's state."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch < 2.12 keeps at most one
    return [] if group is None else [group]


def _unit(name: str, module: FSDPModule, group: Any, topology: Topology, kept: bool) -> Unit:
    params = [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]
    _check_mesh(name, group, topology)
    backward_mesh = group.post_forward_mesh_info
    if backward_mesh is not None and backward_mesh is not group.mesh_info:
        raise ValueError(
            f"{name}: reshard_after_forward is an integer, so that backward gathers from fewer "
            "ranks; must be True or False (fcdp.DeviceCache() keeps as much, and gathers as often)"
        )
    in_backward = group._reshard_after_forward and not kept
    frozen = not any(param.requires_grad for param in params)
    return Unit(
        name,
        module,
        group,
        shard_bytes=sum(map(_gathered_bytes, group.fsdp_params)),
        shard_numel=sum(param._sharded_param_data.numel() for param in group.fsdp_params),
        gather_dtypes=frozenset(map(_gather_dtype, group.fsdp_params)),
        reuses=in_backward + frozen,
    )


def _check_mesh(name: str, group: Any, topology: Topology) -> None:
    """What else parameters are distributed over does not matter: tensor parallelism may be."""
    info = group.mesh_info
    if info.shard_mesh_dim is None or info.replicate_mesh_dim is not None:
        raise ValueError(
            f"{name}: lives on a mesh of {info.mesh.ndim} dimensions {info.mesh.mesh_dim_names} "
            "that replicates; hybrid sharding is not supported, shard over Topology.mesh"
        )
    ranks = dist.get_process_group_ranks(info.shard_process_group)
    expected = dist.get_process_group_ranks(topology.mesh.get_group())
    if ranks != expected:
        raise ValueError(
            f"{name}: sharded over ranks {ranks}; must be those of the topology, {expected}"
        )


def _gathered_bytes(fsdp_param: Any) -> int:
    local = fsdp_param._sharded_local_tensor
    if hasattr(local, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter of shape {tuple(fsdp_param.sharded_param.shape)}: its tensor class "
            f"{type(local).__name__} gathers by an FSDP2 extension, which FCDP cannot cache"
        )
    data: torch.Tensor = fsdp_param._sharded_param_data
    return data.numel() * _gather_dtype(fsdp_param).itemsize


def _gather_dtype(fsdp_param: Any) -> torch.dtype:
    dtype: torch.dtype = fsdp_param._sharded_param_data.dtype
    wanted: torch.dtype | None = fsdp_param.mp_policy.param_dtype
    return wanted if wanted is not None and dtype.is_floating_point else dtype
