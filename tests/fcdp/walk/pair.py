"""Two copies of one model, FSDP2's and FCDP's, and whether they are equal."""

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import topology_of
from tests.fcdp.walk.model import Block, Net, loss_of
from tests.fcdp.walk.options import OPTIMIZERS, POLICIES, Options

#: Whether a backward's sums wait for later micro-batches, end their waiting, or know of none.
Micro = Literal["plain", "waits", "last"]


@lru_cache
def group_of(world: object) -> dist.ProcessGroup:
    """Return a group for the walk's own exchanges, which cannot be taken for others."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


class Side:
    """One copy of the model, with its optimizer."""

    def __init__(self, model: Net, options: Options, *, cached: bool) -> None:
        self.model = model
        assert isinstance(model, FSDPModule)
        self.root: FSDPModule = model
        self.options = options
        self.cached = cached
        for module in (model, *model.blocks):
            register_fsdp_forward_method(
                module, "refine" if isinstance(module, Block) else "encode"
            )
        if options.divide_factor is not None:
            for unit in self.units():
                unit.set_gradient_divide_factor(options.divide_factor)
        #: A state dict of an earlier step, and an average of the parameters.
        self.old_state: dict[str, Any] | None = None
        self.average: dict[str, torch.Tensor] | None = None
        self.follow_parameters()

    def follow_parameters(self) -> None:
        """Make the optimizer: of the sharded parameters, which stay the same objects from here."""
        self.reshard()
        self.params = dict(self.model.named_parameters())
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Adapters have a group of their own."""
        groups = [
            {"params": [p for name, p in self.params.items() if ("adapter" in name) == adapters]}
            for adapters in (False, True)
        ]
        return OPTIMIZERS[self.options.optimizer]([group for group in groups if group["params"]])

    def units(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def reshard(self) -> None:
        """Put all sharded parameters in place."""
        for unit in self.units():
            unit.reshard()

    def let_go(self) -> None:
        """Reshard what FSDP2 keeps gathered after a forward, before it is written.

        That stays as it was when shards are written: FSDP2's own rule, to which users keep. What
        ``fcdp.shard`` keeps gathered beyond it (adapters, if nobody says ``reshard_after_forward``)
        no user of FSDP2 would think of, so that the walk does not either.
        """
        known = {self.model, *self.model.blocks}
        for unit in self.units():
            if unit in known or self.options.reshard_after_forward is False:
                unit.reshard()

    def backward(
        self, tokens: torch.Tensor, skip: frozenset[int], micro: Micro, loss_scale: float = 1.0
    ) -> torch.Tensor:
        with self.accumulating(micro):
            loss = loss_of(self.model(tokens[:, :-1], skip), tokens) * loss_scale
            self.backpropagate(loss)
        return loss.detach()

    @staticmethod
    def backpropagate(loss: torch.Tensor) -> None:
        if loss.requires_grad:  # everything that took part may be frozen
            loss.backward()

    def accumulating(self, micro: Micro) -> contextlib.AbstractContextManager[None]:
        """Return FCDP's context for a micro-batch; FSDP2 adds up what each backward reduces."""
        if not self.cached or micro == "plain":
            return contextlib.nullcontext()
        return fcdp.accumulate(self.model, last=micro == "last")

    def discard(self) -> None:
        """Drop the gradients that wait, as FCDP's users do."""
        if self.cached:
            fcdp.discard(self.model)

    def reset(self) -> None:
        """Reset as FSDP2 asks after an exception in a pass: its gradients are lost.

        FSDP2 keeps those of whole parameters, though, and would add them to the next ones. Before
        torch 2.13 it cannot be reset, and walks have no exceptions within passes.
        """
        if hasattr(self.root, "reset_iter_state"):
            self.root.reset_iter_state()
        if not self.cached:
            self._forget_unsharded_gradients()

    def recover(self) -> None:
        """Begin anew with the parameters as they are, after an error within a pass."""
        self.reset()
        self.reshard()
        self.discard()
        if self.cached:
            fcdp.invalidate(self.model)
        self.optimizer.zero_grad()

    def _forget_unsharded_gradients(self) -> None:
        for unit in self.units():
            unit.unshard()
            assert isinstance(unit, nn.Module)
            for param in unit.parameters():
                if not isinstance(param, DTensor):
                    param.grad = None
            unit.reshard()

    def local(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's part; of what is replicated, the part that ``like`` holds."""
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        if not isinstance(like, DTensor) or tensor.ndim == 0:
            return tensor
        return _part(tensor, like)


def _part(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    (placement,) = like.placements
    assert isinstance(placement, Shard)
    parts = tensor.chunk(like.device_mesh.size(), placement.dim)
    rank = like.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else tensor.narrow(placement.dim, 0, 0)


class Pair:
    """Both copies; equal when made."""

    def __init__(self, options: Options, directory: Path, seed: int) -> None:
        self.options = options
        self.topology = topology_of(options.nodes, options.ranks_per_node)
        self.policy = POLICIES[options.policy](directory)
        self.cached = Side(self._make_cached(seed), options, cached=True)
        self.reference = Side(self._make_reference(seed), options, cached=False)

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.cached, self.reference

    @property
    def not_resharded(self) -> set[str]:
        """Parameters that FCDP keeps whole or gathered where FSDP2 gathers them again."""
        units = engine_of(self.cached.model).controller.not_resharded
        ids = {id(param) for unit in units for param in unit.params}
        return {name for name, param in self.cached.params.items() if id(param) in ids}

    def _make_cached(self, seed: int) -> Net:
        model, options = Net(self.options, seed), self.options
        if options.setup == "shard":
            fcdp.shard(
                model,
                self.topology,
                units=model.blocks,
                policy=self.policy,
                reshard_after_forward=options.reshard_after_forward,
                **options.caching,
            )
        else:
            self._fully_shard(model)
            self.cache(model)
        return model

    def cache(self, model: Net) -> None:
        fcdp.cache_parameters(model, self.topology, self.policy, **self.options.caching)

    def _fully_shard(self, model: Net, **how: Any) -> None:
        reshard = self.options.reshard_after_forward
        for module in (*model.blocks, model):
            fully_shard(module, mesh=self.topology.mesh, reshard_after_forward=reshard, **how)

    def _make_reference(self, seed: int) -> Net:
        """Plain FSDP2, its parameters cut as those of the cached copy are."""
        model = Net(self.options, seed)
        cuts = {
            param: theirs.placements[0] if isinstance(theirs, DTensor) else None
            for param, theirs in zip(
                model.parameters(), self.cached.model.parameters(), strict=True
            )
        }
        self._fully_shard(model, shard_placement_fn=cuts.__getitem__)
        return model

    def difference(self, *, gradients: bool) -> str | None:
        """Return what differs between the copies on this rank: parameters, states, gradients."""
        for name, param in self.reference.params.items():
            other = self.cached.params[name]
            if text := self._differ(name, other, param, param):
                return text
            if other.requires_grad != param.requires_grad:
                return f"{name}.requires_grad: {other.requires_grad}, not {param.requires_grad}"
            if gradients and (text := self._differ(f"{name}.grad", other.grad, param.grad, param)):
                return text
            state, expected = (
                side.optimizer.state.get(key, {})
                for side, key in zip(self.sides, (other, param), strict=True)
            )
            if state.keys() != expected.keys():
                return f"{name}: optimizer state {sorted(state)}, not {sorted(expected)}"
            for key, value in expected.items():
                if text := self._differ(f"{name}.{key}", state[key], value, param):
                    return text
        return None

    def _differ(self, what: str, value: Any, expected: Any, like: torch.Tensor) -> str | None:
        if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
            value = self.cached.local(value, like)
            expected = self.reference.local(expected, like)
        return differ(what, value, expected)


def differ(what: str, value: Any, expected: Any) -> str | None:
    """Return how FCDP's value differs from FSDP2's, bit for bit."""
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        if torch.equal(value, expected):
            return None
        if value.shape != expected.shape:
            return f"{what}: shape {tuple(value.shape)}, not {tuple(expected.shape)}"
        worst = (value - expected).abs().max().item()
        if value.numel() == 1:
            return f"{what}: {value.item()!r}, not {expected.item()!r}"
        return f"{what}: differs by up to {worst:.3g}"
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = enumerate(zip(value, expected, strict=True))
        texts = (differ(f"{what}[{i}]", *pair) for i, pair in pairs)
        return next((text for text in texts if text), None)
    if isinstance(value, dict) and isinstance(expected, dict):
        shared = value.keys() & expected.keys()
        texts = (differ(f"{what}[{key!r}]", value[key], expected[key]) for key in sorted(shared))
        return next((text for text in texts if text), None)
    return None if value == expected else f"{what}: {value!r}, not {expected!r}"
