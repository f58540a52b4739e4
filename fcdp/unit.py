"""A unit: one FSDP2 parameter group, which is one gather and one cache entry."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fcdp import fsdp2, grouping
from fcdp.agreement import check_alike, on_all_ranks
from fcdp.counts import writes
from fcdp.exchange import on_every_rank
from fcdp.extensions import check_held, held, is_extended, names_inside
from fcdp.topology import Topology


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that one gather moves: one FSDP2 parameter group, described once and for all.

    What changes over time is the cache's (:class:`fcdp.cache.cache.Entry`).
    """

    name: str
    module: FSDPModule
    #: FSDP2's ``FSDPParamGroup``.
    group: Any
    #: The ranks that it is sharded over: the model's topology, or a part of it, as experts have.
    topology: Topology
    #: One rank's part of the gather, in bytes of the gather dtype, padding included.
    shard_bytes: int
    #: Elements of it, padding included.
    shard_numel: int
    #: Dtypes that they are gathered in; usually one.
    gather_dtypes: frozenset[torch.dtype]
    #: How often a step gathers it again without it having changed: ``fcdp.grouping.reuses``.
    reuses: int = 1
    #: Bytes of this rank's part of each parameter that gathers by an extension, by its place.
    packed: Mapping[int, int] = field(default_factory=dict)

    @property
    def params(self) -> list[DTensor]:
        """Sharded parameters, as the optimizer sees them; FSDP2's, as a load may replace them."""
        return fsdp2.sharded_params(self.group)

    @property
    def parts(self) -> list[tuple[int, torch.dtype]]:
        """Elements and dtype of each parameter's part now, padding included: a cast changes it.

        An extension's part is bytes.
        """
        return _parts(self.group, self.packed)

    def bytes_due(self) -> int:
        """Bytes of this rank's part of a gather now: a cast changes them, an extension may not."""
        return sum(numel * dtype.itemsize for numel, dtype in self.parts)

    @property
    def trainable(self) -> bool:
        return any(param.requires_grad for param in self.params)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that gradients are reduced in, as this torch takes it; ``None`` if frozen."""
        return fsdp2.reduce_dtype(self.group)

    @property
    def hooked(self) -> bool:
        """Whether a hook of the user's is called with each gradient as soon as it is reduced."""
        return fsdp2.reduce_hook(self.group) is not None or any(
            getattr(param, "_post_accumulate_grad_hooks", None) for param in self.params
        )

    @functools.cached_property
    def _names_inside(self) -> list[list[str]]:
        """Names of the tensors inside of each parameter, as first seen."""
        return [names_inside(param._local_tensor) for param in self.params]

    @property
    def held(self) -> list[torch.Tensor]:
        """The plain tensors that hold this rank's shards."""
        pairs = zip(self.params, self._names_inside, strict=True)
        return [each for param, names in pairs for each in held(param._local_tensor, names)]

    def shard(self, device: torch.device) -> torch.Tensor:
        """Return what a gather would read of this rank now (s), as FSDP2's copy-in makes it.

        With extensions, whose calls may be collective: the bytes that they would make it of.
        """
        if self.packed:
            return torch.cat([_as_bytes(each.to(device)) for each in self.held])
        parts = [data.to(device, dtype) for data, dtype in fsdp2.shards(self.group)]
        if len(self.gather_dtypes) > 1:  # gathered as bytes
            parts = [part.view(torch.uint8) for part in parts]
        return torch.cat(parts)

    def stamp(self) -> int:
        """Return a number that grows with each in-place write that autograd sees on this rank.

        Writes through the parameter count on the DTensor, writes through ``to_local()`` on the
        tensor inside, those to what a packed one holds there. Writes through ``.data``, behind
        ``detach()``, by ``torch._foreach_*`` on DTensors and by fused optimizer kernels do not
        count at all: see :mod:`fcdp.staleness`.
        """
        inside = sum(each._version for each in self.held) if self.packed else 0
        return writes(self.params) + inside


def entry_size(unit: Unit) -> int:
    """Bytes of a unit's entry in the cache: the shards of the other nodes that its mesh is on."""
    return grouping.entry_bytes(unit.shard_bytes, unit.topology.nodes)


def find_units(model: nn.Module, topology: Topology) -> list[Unit]:
    """The units of a model that FSDP2 has sharded, in the order of ``named_modules``.

    Raises ``ValueError`` for a model without FSDP2, one sharded over other ranks than those of
    ``topology``, unevenly over its nodes, or not at all, an integer as ``reshard_after_forward``,
    units that differ between ranks, and gather extensions that hide what they hold or send other
    sizes on other ranks. Collective, as the calls of gather extensions may be, and as each further
    mesh gets a topology.
    """
    found = on_all_ranks("model", topology, lambda: _groups(model))
    # Each exchange below has a number per unit, or per packed parameter. Names may differ: each
    # rank may call the experts that it has by numbers of their own.
    packed = [
        [is_extended(param._local_tensor) for param in fsdp2.sharded_params(group)]
        for _, _, group, _ in found
    ]
    check_alike(topology, units=packed)
    meshes = [(name, fsdp2.shard_mesh(group)) for name, _, group, _ in found]
    topologies = _topologies(meshes, topology)
    units: list[Unit] = []
    for place, own, extended in zip(found, topologies, packed, strict=True):
        name, module, group, gathered = place
        build = functools.partial(_unit, name, module, group, topology=own, gathered=gathered)
        # An extension may raise, or FSDP2 refuse what it returns where there is padding.
        units.append(on_all_ranks("model", topology, build) if any(extended) else build())
    _check_sizes([unit for unit in units if unit.packed], topology)
    return units


def _groups(model: nn.Module) -> list[tuple[str, FSDPModule, Any, bool]]:
    """FSDP2's parameter groups, each with its name, module, and whether that stays gathered."""
    found: list[tuple[str, FSDPModule, Any, bool]] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = fsdp2.state(module)
        if id(state) in seen:  # fully_shard([a, b]) gives a and b one state
            continue
        seen.add(id(state))
        groups = fsdp2.param_groups(module)
        # FSDP2 keeps what the root holds itself gathered, unless told otherwise.
        gathered = not name and fsdp2.keeps_root(state)
        for at, group in enumerate(groups):  # one per mesh
            called = (name or "root") + f"[{at}]" * (len(groups) > 1)
            _check(called, group)
            found.append((called, module, group, gathered))
    if not found:
        raise ValueError(
            "model: no module is sharded by FSDP2; call fcdp.shard(model, topology, units=...) "
            "or torch.distributed.fsdp.fully_shard on it first"
        )
    return found


def _check_sizes(units: Sequence[Unit], whole: Topology) -> None:
    """Check that extensions send as much of each parameter on all ranks that share it. Collective.

    Where they do not, a gather would end the process, or mix up a unit's parameters: raises
    ``ValueError`` on all ranks.
    """
    if not units:
        return
    mine = [size for unit in units for size in unit.packed.values()]
    columns = iter(on_every_rank(torch.tensor(mine, device="cpu"), whole).T.tolist())
    places = {rank: place for place, rank in enumerate(_ranks(whole.mesh))}

    def compare() -> None:
        for unit in units:
            for column in itertools.islice(columns, len(unit.packed)):
                sizes = {rank: column[places[rank]] for rank in _ranks(unit.topology.mesh)}
                low, high = (of(sizes, key=lambda rank: sizes[rank]) for of in (min, max))
                if sizes[low] != sizes[high]:
                    raise ValueError(
                        f"{unit.name}: its gather extensions return {sizes[low]} bytes on rank "
                        f"{low} and {sizes[high]} on rank {high}; fsdp_pre_all_gather must return "
                        "tensors of the same sizes on each rank"
                    )

    on_all_ranks("model", whole, compare)


def _topologies(meshes: Sequence[tuple[str, DeviceMesh]], whole: Topology) -> list[Topology]:
    """The topology of each named mesh: ``whole``, or a part of it, one for all equal meshes.

    Raises ``ValueError`` on every rank if a mesh has other ranks or lies unevenly on the nodes of
    any rank. What is decided for a unit must be alike on all.
    """
    all_ranks = _ranks(whole.mesh)
    of_whole = [_ranks(mesh) == all_ranks for _, mesh in meshes]
    if all(of_whole):
        return [whole] * len(meshes)
    ranks_of = [mesh.mesh.tolist() for _, mesh in meshes]
    shapes = torch.tensor([whole.shape_of(ranks) or (0, 0) for ranks in ranks_of], device="cpu")
    everywhere = on_every_rank(shapes.flatten(), whole).view(whole.world_size, -1, 2)
    alike = (everywhere == everywhere[0]).all(0) & (everywhere > 0).all(0)
    for (name, _), ranks, is_alike in zip(meshes, ranks_of, alike.all(1).tolist(), strict=True):
        if not is_alike:
            raise ValueError(
                f"{name}: sharded over ranks {ranks}; must be those of the topology, "
                f"{list(all_ranks)}, or some of them, ascending, as many on each node that has any"
            )
    return [
        whole if is_whole else on_all_ranks("model", whole, functools.partial(whole.part, mesh))
        for (_, mesh), is_whole in zip(meshes, of_whole, strict=True)
    ]


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group()))


def _unit(name: str, module: FSDPModule, group: Any, *, topology: Topology, gathered: bool) -> Unit:
    in_backward = fsdp2.gathers_in_backward(group) and not gathered
    frozen = not any(param.requires_grad for param in fsdp2.sharded_params(group))
    packed = fsdp2.extension_bytes(group)
    parts = _parts(group, packed)
    return Unit(
        name,
        module,
        group,
        topology=topology,
        shard_bytes=sum(numel * dtype.itemsize for numel, dtype in parts),
        shard_numel=sum(fsdp2.part_sizes(group).values()),
        gather_dtypes=frozenset(dtype for _, dtype in parts),
        reuses=grouping.reuses(in_backward=in_backward, frozen=frozen),
        packed=packed,
    )


def _parts(group: Any, packed: Mapping[int, int]) -> list[tuple[int, torch.dtype]]:
    """Elements and dtype of each parameter's part; of ``packed`` ones, bytes."""
    return [
        (packed[at], torch.uint8) if at in packed else (data.numel(), dtype)
        for at, (data, dtype) in enumerate(fsdp2.shards(group))
    ]


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _check(name: str, group: Any) -> None:
    """Raise ``ValueError`` for a group that is sharded, or gathered, as no cache can serve it."""
    info, backward_info = fsdp2.meshes(group)
    # Parameters may be distributed over other dimensions too, as by tensor parallelism, and
    # replicated over another: FSDP2 adds up what each replica has reduced.
    if info.shard_mesh_dim is None:
        raise ValueError(
            f"{name}: is replicated over the mesh {info.mesh.mesh_dim_names} and sharded over "
            "none; name the dimension to shard over (DataParallelMeshDims(shard=...))"
        )
    if backward_info is not None and backward_info is not info:
        raise ValueError(
            f"{name}: reshard_after_forward is an integer, so that backward gathers from fewer "
            "ranks; must be True or False (fcdp.DeviceCache() keeps as much, and gathers as often)"
        )
    for param in fsdp2.sharded_params(group):
        check_held(f"{name}: parameter of shape {tuple(param.shape)}", param._local_tensor)
