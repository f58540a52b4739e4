"""A client's calls of ``fully_shard``, gathered up and carried out as one of ``fcdp.shard``."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fcdp.api import cache_parameters, shard
from fcdp.arguments import check_topology, policy_of
from fcdp.blocks import find_blocks
from fcdp.cache.policy import CachePolicy
from fcdp.partition import own_modules
from fcdp.topology import Topology

#: Arguments of ``fcdp.shard`` that a client's call of ``fully_shard`` has of its own.
_THEIRS = ("units", "mp_policy", "offload_policy", "reshard_after_forward", "ignored_params")


def check_version(package: str, known: str) -> None:
    """Raise ``ValueError`` unless a client is of the release that was read and is tested."""
    installed = version(package)
    if installed.split(".")[:2] != known.split(".")[:2]:
        raise ValueError(
            f"{package} {installed}: fcdp.integrations knows {known}; install {package}=={known}.*"
            ", or shard the model by fcdp.shard in a loop of your own"
        )


def replace_in(package: str, function: Any, value: Any) -> None:
    """Replace a function wherever a package's imported modules have it by its name."""
    name: str = function.__name__
    for at, module in [*sys.modules.items()]:
        here = at.partition(".")[0] == package
        if here and getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, value)


def check_options(options: dict[str, Any], theirs: tuple[str, ...] = _THEIRS) -> None:
    """Raise ``ValueError`` for arguments that are none of ``fcdp.shard``, or the client's."""
    names = [*inspect.signature(shard).parameters][2:]
    allowed = [name for name in names if name not in (*theirs, "policy")]
    for name, value in options.items():
        if name not in allowed:
            why = "follows from the client's own settings" if name in theirs else "is not known"
            raise ValueError(f"{name} = {value!r}: {why}; must be one of {', '.join(allowed)}")


def topology_over(mesh: DeviceMesh | None, topology: Topology | None) -> Topology:
    """Return the topology over the client's mesh; ``None``: that of the mesh or of torchrun."""
    if mesh is not None and mesh.ndim > 1:
        raise ValueError(
            f"mesh: has {mesh.ndim} dimensions {mesh.mesh_dim_names}; must be one that "
            "parameters are sharded over and none that they are replicated over: set the "
            "degree of replication (dp_replicate_size, data_parallel_replicate_degree) to 1"
        )
    if topology is None:
        topology = Topology.from_env() if mesh is None else Topology.of_mesh(mesh)
    ranks = topology.mesh.mesh.tolist()
    if mesh is not None and mesh.mesh.tolist() != ranks:
        raise ValueError(
            f"topology: is of the ranks {ranks}; must be of those that the client shards over, "
            f"{mesh.mesh.tolist()}: leave it out, or pass fcdp.Topology.of_mesh(mesh)"
        )
    return topology


@contextlib.contextmanager
def _in_place_of(owner: Any, stand_in: Callable[..., Any]) -> Iterator[None]:
    """In the body, have ``owner`` call a stand-in for ``fully_shard``."""
    plain, owner.fully_shard = owner.fully_shard, stand_in
    try:
        yield
    finally:
        owner.fully_shard = plain


class Takeover:
    """A stand-in for ``fully_shard`` that shards when a root is asked for."""

    def __init__(self) -> None:
        self._end: contextlib.ExitStack | None = None
        self._calls: list[tuple[nn.Module | list[nn.Module], dict[str, Any]]] = []
        #: Models that were sharded here.
        self.models: WeakSet[nn.Module] = WeakSet()

    def use(
        self, topology: Topology | None, policy: CachePolicy | str, options: dict[str, Any]
    ) -> contextlib.ExitStack:
        """Start, and return what ends it; models that were sharded stay as they are.

        Without a topology, the client's mesh or torchrun's environment tells it. Raises
        ``ValueError`` for arguments that ``fcdp.shard`` would refuse.
        """
        if topology is not None:
            check_topology(topology)
        check_options(options)
        self._topology = topology
        self._policy = policy_of(policy)
        self._options = options
        self._end = end = contextlib.ExitStack()
        end.callback(self._finish, end)
        return end

    def _finish(self, end: contextlib.ExitStack) -> None:
        if self._end is end:  # of a later use it is another
            self._end = None

    @property
    def in_use(self) -> bool:
        """Whether the client is to shard by FCDP; else it does as without."""
        return self._end is not None

    @contextlib.contextmanager
    def of(self, root: nn.Module, owner: Any, apart: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Take the calls of ``owner.fully_shard`` in the body, and shard with that of ``root``.

        Modules ``apart`` become units too. Where this is not in use, it does nothing.
        """
        if not self.in_use:
            yield
            return

        def take(module: nn.Module | list[nn.Module], **kwargs: Any) -> Any:
            if module is root:
                self._shard(root, kwargs, apart)
            else:
                self._calls.append((module, kwargs))
            return module

        try:
            with _in_place_of(owner, take):
                yield
        finally:
            self._calls.clear()

    @contextlib.contextmanager
    def as_sharded(
        self, root: nn.Module, owner: Any, apart: Sequence[nn.Module] = ()
    ) -> Iterator[None]:
        """Cache ``root`` as the client's calls in the body shard it, over meshes of their own.

        Modules ``apart`` become units by themselves. Where this is not in use, it does nothing.
        """
        if not self.in_use:
            yield
            return
        plain = owner.fully_shard

        def split(module: nn.Module | list[nn.Module], **kwargs: Any) -> Any:
            modules = module if isinstance(module, list) else [module]
            for each in modules:
                if each in apart:  # resharded, by FSDP2's default
                    plain(each, **{**kwargs, "reshard_after_forward": None})
            if others := [each for each in modules if each not in apart]:
                plain(others if len(others) > 1 else others[0], **kwargs)
            return module

        with _in_place_of(owner, split):
            yield
        self._topology = self._topology or Topology.from_env()
        cache_parameters(root, self._topology, self._policy, **self._options)
        self.models.add(root)

    def _shard(self, root: nn.Module, kwargs: dict[str, Any], apart: Sequence[nn.Module]) -> None:
        single = [each for module, each in self._calls if isinstance(module, nn.Module)] or [kwargs]
        reshard = {each.get("reshard_after_forward", True) for each in single}
        kinds = {each.get("mp_policy", MixedPrecisionPolicy()) for each in [*single, kwargs]}
        if len(kinds | reshard) > 2:
            raise ValueError(
                f"{type(root).__name__}: mp_policy or reshard_after_forward differs between its "
                "modules; must be one for all"
            )
        (keep,) = reshard
        self._topology = topology_over(kwargs.get("mesh"), self._topology)
        shard(
            root,
            self._topology,
            units=self._units(root, apart),
            policy=self._policy,
            mp_policy=kinds.pop(),
            offload_policy=kwargs.get("offload_policy") or OffloadPolicy(),
            # By FSDP2's default blocks do not stay gathered, and a root does.
            reshard_after_forward=kwargs.get("reshard_after_forward") if keep is True else keep,
            ignored_params=kwargs.get("ignored_params") or (),
            **self._options,
        )
        self.models.add(root)

    def _units(self, root: nn.Module, apart: Sequence[nn.Module]) -> list[nn.Module] | None:
        """Modules that the client shards by itself, and the model's blocks if it left them whole.

        A list of modules that it keeps gathered joins the root's unit, which stays gathered too.
        """
        asked: list[nn.Module] = []
        for module, kwargs in self._calls:
            if isinstance(module, nn.Module):
                asked.append(module)
            elif kwargs.get("reshard_after_forward") is not False:
                asked += module
        try:
            blocks = find_blocks(root)
        except ValueError:
            blocks = []
        inside = {part for module in asked for part in module.modules()}
        around = {module for module in asked if not inside.isdisjoint(blocks)}
        if not around:
            asked += blocks
        asked += apart  # the last to run
        units = dict.fromkeys(asked)
        # An activation checkpoint's wrapper holds nothing that its layer does not.
        return [
            unit
            for unit in units
            if any([*part.parameters(recurse=False)] for part in own_modules(unit, units.keys()))
        ] or None
