"""Mixtures of experts whose experts are sharded over a mesh of their own, as torchtitan does it."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fcdp
from fcdp import fsdp2
from fcdp.engine import engine_of
from fcdp.extensions import held, names_inside
from tests.fcdp.checkpoints import errors_of
from tests.fcdp.extended import Packed
from tests.fcdp.releases import since_2_12
from tests.fcdp.training import params_of, topology_of
from tests.fcdp.upstream.running import EXACT, adam, differences
from tests.ranks import Pools, on_ranks

WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 6, 8, 5
STEPS, MICRO_BATCHES = 3, 2
#: Before this step there is an evaluation, of this number.
EVALUATED, EVALUATION = 1, 100
#: In which part of the experts all tokens of a pass find theirs, in turns; ``None``: in all. The
#: first pass calls all, as FSDP2 keeps no gradients of what it has never gathered.
ONLY = (None, None, 0, 0, 1, None, 1)
HOST = fcdp.HostCache()


@dataclass(frozen=True)
class Layout:
    """Nodes, and how experts lie on them."""

    nodes: int
    ranks_per_node: int
    #: Ranks among which the experts are divided; the parts of each are sharded over the others.
    ep: int
    #: Whether these ranks stand on different nodes, and those of a part together.
    across: bool = False
    #: Whether a block holds experts and dense parameters in one FSDP2 module of two meshes.
    mixed: bool = False
    #: Experts that nobody trains.
    frozen: bool = False
    #: How frozen experts are packed, in a tensor class that gathers by an extension.
    codes: Literal["bytes", "nf4"] | None = None
    #: Whether ranks do not call experts that get no tokens in a pass.
    skips: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nodes_of_experts(self) -> int:
        """The nodes that the parts of one expert are on."""
        ranks = self.world_size // self.ep
        return max(1, ranks // self.ranks_per_node) if self.across else min(self.nodes, ranks)


class Experts(nn.Module):
    """Experts in one parameter per matrix: (experts, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply each expert of this rank to its ``counts`` of ``tokens`` (t, width), in order."""
        up, down = (
            values_of(param).view(-1, *shape)
            for param, shape in ((self.up, (WIDTH, HIDDEN)), (self.down, (HIDDEN, WIDTH)))
        )
        parts = zip(tokens.split(counts), up, down, strict=True)
        return torch.cat([F.gelu(part @ first) @ second for part, first, second in parts])


def pack(experts: Experts, kind: Literal["bytes", "nf4"]) -> None:
    """Hold this rank's experts in a packed class, one matrix above the other."""
    for name, param in experts.named_parameters():
        local: torch.Tensor = param.detach().to_local().flatten(0, 1)  # type: ignore[attr-defined]
        packed = Packed.of(local) if kind == "bytes" else of_torchao(local)
        setattr(experts, name, nn.Parameter(packed, requires_grad=False))


def of_torchao(values: torch.Tensor) -> torch.Tensor:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    packed: torch.Tensor = to_nf4(values, block_size=16, scaler_block_size=6)
    return packed


def values_of(param: Any) -> torch.Tensor:
    """The values of a parameter that this rank has gathered, unpacked."""
    local = param.to_local() if isinstance(param, DTensor) else param
    values: torch.Tensor = getattr(local, "get_original_weight", lambda: local)()
    return values


class Mixture(nn.Module):
    """Sends each token to the expert that its router prefers, on whatever rank."""

    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.ep = ep
        #: The part of the experts that all tokens go to, the only one that is called then.
        self.only: int | None = None
        self.skips = False
        if ep is not None:
            for name, param in self.experts.named_parameters():
                divided = distribute_tensor(param.detach(), ep, [Shard(0)])
                setattr(self.experts, name, nn.Parameter(divided))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x)
        if self.ep is not None and self.only is not None:
            closed = torch.full_like(scores, -math.inf)
            closed.chunk(self.ep.size(), -1)[self.only].zero_()
            scores = scores + closed
        weights, chosen = scores.softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        y = self._of_experts(x[order], counts)
        return y[order.argsort()] * weights[:, None]

    def _of_experts(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.ep is None:
            return self.experts(tokens, counts.tolist())
        group, ranks = self.ep.get_group(), self.ep.size()
        arriving = all_to_all_single(counts, None, None, group).view(ranks, -1)
        sent, received = (
            each.view(ranks, -1).sum(1).tolist() for each in (counts, arriving.flatten())
        )
        tokens = all_to_all_single_autograd(tokens, received, sent, group)
        experts = torch.arange(arriving.shape[1]).repeat(ranks)
        order = experts.repeat_interleave(arriving.flatten()).argsort(stable=True)
        y = tokens[order]
        if self.only in (None, self.ep.get_local_rank()):
            y = self.experts(y, arriving.sum(0).tolist())
        return all_to_all_single_autograd(y[order.argsort()], sent, received, group)


class Block(nn.Module):
    def __init__(self, ep: DeviceMesh | None) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(self.norm(x)).tanh()
        return x + self.mixture(x)


@lru_cache
def meshes(world_size: int, ep: int, across: bool) -> dict[str, DeviceMesh]:
    """The meshes of expert parallelism, and of the shards of each expert."""
    ranks = torch.arange(world_size)
    if across:
        ranks = ranks.view(ep, -1).T
    both = DeviceMesh("cpu", ranks.reshape(-1, ep), mesh_dim_names=("efsdp", "ep"))
    return {"efsdp": both["efsdp"], "ep": both["ep"]}


def set_up(
    layout: Layout, *, cached: bool, seed: int = 0, policy: fcdp.CachePolicy = HOST
) -> nn.Sequential:
    """A model, sharded as torchtitan shards it; FCDP alone knows nothing of experts."""
    torch.manual_seed(seed)
    topology = topology_of(layout.nodes, layout.ranks_per_node)
    mesh = meshes(layout.world_size, layout.ep, layout.across) if layout.ep > 1 else {}
    model = nn.Sequential(*(Block(mesh.get("ep")) for _ in range(2)), nn.Linear(WIDTH, 3))
    for name, param in model.named_parameters():
        param.requires_grad_(not (layout.frozen and ".experts." in name))
    # Sums of fp32 in fp64 do not depend on their order, and two summands have one.
    wide = torch.float64 if layout.world_size > 2 else None
    options: dict[str, Any] = {
        "mesh": topology.mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=wide),
    }
    for block in model[:-1]:
        if layout.codes is not None:
            pack(block.mixture.experts, layout.codes)
        if layout.mixed:
            options["shard_placement_fn"] = two_meshes(block, topology.mesh, mesh["efsdp"])
        elif layout.ep > 1:
            fully_shard(block.mixture.experts, **{**options, "mesh": mesh["efsdp"]})
        fully_shard(block, **options)
    options.pop("shard_placement_fn", None)
    fully_shard(model, **options)
    for module in sharded(model):
        module.set_gradient_divide_factor(layout.world_size)
        if layout.skips and not cached:
            # Nothing ahead that waits, as FSDP2 does over gloo: ranks that come to it later may be
            # waited for by the tokens of others.
            module.set_modules_to_backward_prefetch([module])
    for block in model[:-1]:
        block.mixture.skips = layout.skips
    if cached:
        verified = fcdp.CacheOptions(verify=True)
        fcdp.cache_parameters(model, topology, policy=policy, cache=verified)
    return model


def two_meshes(block: Any, dense: DeviceMesh, of_experts: DeviceMesh) -> Any:
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    experts = {*block.mixture.experts.parameters()}
    infos = [common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0) for mesh in (dense, of_experts)]

    def place(param: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), infos[param in experts])

    return place


def sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextlib.contextmanager
def micro_batch(model: nn.Module, nodes: dict[int, int], *, last: bool) -> Iterator[None]:
    """One of several: without FCDP, FSDP2 is told to reduce what crosses nodes with the last."""
    if fcdp.is_cached(model):
        with fcdp.accumulate(model, last=last):
            yield
        return
    for module in sharded(model):
        for group in fsdp2.param_groups(module):
            group.reduce_grads = last or nodes[fsdp2.shard_mesh(group).size()] == 1
    yield


def only(number: int, block: int) -> int | None:
    """The part of a block's experts that is called in a pass of this number; ``None``: all."""
    return ONLY[(number + block) % len(ONLY)]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    mixtures = (each for each in model.modules() if isinstance(each, Mixture))
    for block, mixture in enumerate(mixtures):
        if mixture.skips:
            mixture.only = only(step, block)
    return model(torch.randn(TOKENS, WIDTH, generator=generator)).square().sum()


def train(model: nn.Module, nodes: dict[int, int]) -> list[tuple[str, Any]]:
    """Train with and without gradients; return what was seen.

    ``nodes`` has those of the meshes that parameters are sharded over, by the ranks of these.
    """
    optimizer = adam(model)
    seen: list[tuple[str, Any]] = []
    for step in range(STEPS):
        if step == EVALUATED:
            with torch.no_grad():
                seen.append(("evaluation", loss_of(model, EVALUATION)))
        for at in range(MICRO_BATCHES):
            with micro_batch(model, nodes, last=at == MICRO_BATCHES - 1):
                loss = loss_of(model, MICRO_BATCHES * step + at)
                loss.backward()
            seen.append((f"loss {step}.{at}", loss.detach()))
        seen += [
            (f"{name}.grad {step}", param.grad.to_local().clone())
            for name, param in model.named_parameters()
            if param.grad is not None
        ]
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        local: torch.Tensor = param.detach().to_local()  # type: ignore[attr-defined]
        seen += [(name, each) for each in held(local, names_inside(local))]
    return seen


def problems(layout: Layout, policy: fcdp.CachePolicy = HOST) -> list[str]:
    nodes = {
        layout.world_size // layout.ep: layout.nodes_of_experts,
        layout.world_size: layout.nodes,
    }
    plain = train(set_up(layout, cached=False), nodes)
    seen = train(model := set_up(layout, cached=True, policy=policy), nodes)
    return [*differences(plain, seen, EXACT), *miscounted(layout, model)]


def miscounted(layout: Layout, model: nn.Module) -> list[str]:
    """Differences between the ledger and the closed forms.

    Whatever is trained crosses nodes once per step and its gradients once, what is frozen once
    ever, what lies within one node never, and experts in the steps that call them.
    """
    gathered = reduced = block = 0
    for unit in engine_of(model).units:
        experts = len(unit.params) == 2 and (unit.params[0].ndim == 3 or bool(unit.packed))
        nodes = layout.nodes_of_experts if experts else layout.nodes
        assert unit.topology.nodes == nodes, unit.name
        assert (unit in engine_of(model).entries) == (nodes > 1 or layout.nodes == 1)
        itemsize = 8 if layout.world_size > 2 else 4
        read, trained = STEPS, STEPS
        if experts:
            read, trained = steps_with(layout, block)
            block += 1
        if unit.trainable:
            reduced += trained * (nodes - 1) * unit.shard_numel * itemsize
        gathered += (read if unit.trainable else 1) * (nodes - 1) * unit.shard_bytes
    sent = fcdp.ledger(model).snapshot().get("inter_node", {"forward": 0, "reduce": 0})
    expected = {"forward": gathered, "reduce": reduced}
    return [] if sent == expected else [f"sent {sent}, expected {expected}"]


def steps_with(layout: Layout, block: int) -> tuple[int, int]:
    """Steps in which this rank calls its experts of a block: with an evaluation before, without."""
    if not layout.skips:
        return STEPS, STEPS
    part = meshes(layout.world_size, layout.ep, layout.across)["ep"].get_local_rank()

    def calls(numbers: Iterable[int]) -> bool:
        return any(only(each, block) in (None, part) for each in numbers)

    trained = [[MICRO_BATCHES * step + at for at in range(MICRO_BATCHES)] for step in range(STEPS)]
    read = [[*each, *[EVALUATION] * (step == EVALUATED)] for step, each in enumerate(trained)]
    return sum(map(calls, read)), sum(map(calls, trained))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, ep=2),
        Layout(1, 2, ep=2),
        Layout(2, 1, ep=2),
        Layout(2, 2, ep=1),
        Layout(2, 2, ep=2, frozen=True),
        Layout(2, 2, ep=2, across=True),
        Layout(2, 2, ep=4, frozen=True),
        pytest.param(Layout(2, 1, ep=2, mixed=True), marks=since_2_12),
        pytest.param(Layout(2, 2, ep=2, mixed=True), marks=since_2_12),
        pytest.param(Layout(2, 2, ep=2, across=True, mixed=True), marks=since_2_12),
        pytest.param(Layout(2, 2, ep=4, mixed=True), marks=since_2_12),
        Layout(2, 2, ep=2, skips=True),
        Layout(2, 2, ep=2, frozen=True, skips=True),
        Layout(2, 2, ep=2, frozen=True, codes="bytes", skips=True),
        Layout(2, 2, ep=2, across=True, skips=True),
        Layout(4, 1, ep=2, across=True, skips=True),
        Layout(2, 4, ep=2, skips=True),
        Layout(2, 4, ep=2, across=True, skips=True),
        Layout(2, 4, ep=2),
        Layout(2, 4, ep=4),
        Layout(2, 4, ep=2, across=True),
        Layout(2, 4, ep=4, across=True),
    ],
    ids=str,
)
def test_training_equals_fsdp2_to_the_bit_and_sends_the_closed_form(
    ranks: Pools, layout: Layout
) -> None:
    assert ranks.run(layout.world_size, problems, layout) == [[]] * layout.world_size


def test_experts_in_nf4_cross_once_and_what_is_trained_equals_fsdp2_to_the_bit(
    ranks: Pools,
) -> None:
    pytest.importorskip("torchao", reason="the group quantised has it")
    layout = Layout(2, 2, ep=2, frozen=True, codes="nf4", skips=True)
    assert ranks.run(4, problems, layout) == [[]] * 4


@on_ranks(4)
def test_ranks_that_call_different_experts_ask_their_own_for_what_a_disk_may_lack(
    tmp_path: Path,
) -> None:
    assert not problems(Layout(2, 2, ep=2, skips=True), fcdp.DiskCache(tmp_path))


@on_ranks(4)
def test_ranks_that_call_different_experts_in_the_first_pass_may_keep_them_on_devices() -> None:
    """FSDP2 alone raises an ``AttributeError`` where it accumulates in such a pass."""
    layout, nodes = Layout(2, 2, ep=2, frozen=True, skips=True), {2: 2, 4: 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.ONLY", (0, 1, 0, 1, None, 1, 0))
        host, device = (
            train(set_up(layout, cached=True, policy=policy), nodes)
            for policy in (HOST, fcdp.DeviceCache())
        )
    assert not differences(host, device, EXACT)


@on_ranks(4)
def test_a_checkpoint_is_read_over_other_meshes(tmp_path: Path) -> None:
    """Parameters and the optimizer's state, as the next step shows; so are other forms of them."""
    saved = set_up(Layout(2, 2, ep=2), cached=True)
    other = set_up(Layout(2, 2, ep=2, across=True), cached=True, seed=1)
    first, second = adam(saved), adam(other)
    for number in range(2):
        loss_of(saved, number).backward()
        first.step()
        first.zero_grad()
        if number == 0:
            fcdp.save(saved, first, tmp_path)
            fcdp.load(other, second, tmp_path)
            torch.testing.assert_close(params_of(other), params_of(saved), **EXACT)
    loss_of(other, 1).backward()
    second.step()
    torch.testing.assert_close(params_of(other), params_of(saved))
    fcdp.export(saved, tmp_path)
    fcdp.publish(saved, tmp_path / "published")
    dist.barrier()
    reader = fcdp.Subscriber(tmp_path / "published")
    reader.update()
    for written in (load_file(tmp_path / "model.safetensors"), reader.state):
        torch.testing.assert_close(written, params_of(saved), **EXACT)


class Own(nn.Module):
    """An expert that a rank has of its own, in no DTensor, by one name or by one of its own."""

    def __init__(self, name: str, numel: int = WIDTH) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        first, second = nn.Linear(WIDTH, numel), nn.Linear(numel, WIDTH)
        self.experts = nn.ModuleDict({name: nn.Sequential(first, second)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (expert,) = self.experts.values()
        y: torch.Tensor = expert(self.dense(x))
        return y


def of_its_own(*, named: bool, policy: fcdp.CachePolicy = HOST, sizes: bool = False) -> nn.Module:
    """Set up: ranks 0 and 2 have one expert, and ranks 1 and 3 another, of another size or not."""
    mesh, topology = meshes(4, 2, False), topology_of(2, 2)
    part = mesh["ep"].get_local_rank()
    torch.manual_seed(part)
    model = Own(f"{part * named}", WIDTH * (1 + part * sizes))
    (expert,) = model.experts.values()
    fully_shard(expert, mesh=mesh["efsdp"])
    fully_shard(model, mesh=topology.mesh)
    return fcdp.cache_parameters(model, topology, policy)


@pytest.mark.parametrize("codes", ["bytes", None])
@on_ranks(4)
def test_what_a_name_means_on_one_mesh_alone_is_not_written(
    tmp_path: Path, codes: Literal["bytes"] | None
) -> None:
    """Each rank would read the experts of the first mesh, whichever it had."""
    if codes is None:
        model, name = of_its_own(named=False), "experts.0.0.weight"
    else:
        model = set_up(Layout(2, 2, ep=2, frozen=True, codes=codes), cached=True)
        name = "0.mixture.experts.up"
    refusal = f"ValueError: {name}: has other values on ranks of other meshes; must be a DTensor"
    assert errors_of(fcdp.save, model, adam(model), tmp_path / "saved").startswith(refusal)
    assert errors_of(fcdp.publish, model, tmp_path / "published").startswith(refusal)
    if codes is None:
        assert errors_of(fcdp.export, model, tmp_path / "exported").startswith(refusal)
    else:
        fcdp.save_adapters(model, tmp_path / "adapters")
        fcdp.publish(model, tmp_path / "trained", trainable_only=True)
    for folder in ("saved", "published", "exported"):
        assert not (tmp_path / folder).exists()


@on_ranks(4)
def test_names_that_some_ranks_alone_have_are_not_saved(tmp_path: Path) -> None:
    """No rank could read it again, and an export would lack the experts of others."""
    model = of_its_own(named=True)
    refusal = "ValueError: names of parameters: differs between ranks; must be alike on all"
    assert errors_of(fcdp.save, model, adam(model), tmp_path / "saved") == refusal
    assert errors_of(fcdp.export, model, tmp_path / "exported") == refusal
    fcdp.publish(model, tmp_path / "published")
    dist.barrier()
    reader = fcdp.Subscriber(tmp_path / "published")
    reader.update()
    assert {"experts.0.0.weight", "experts.1.0.weight"} <= reader.state.keys()


@on_ranks(4)
def test_a_policy_that_places_units_otherwise_on_some_ranks_is_refused_on_all() -> None:
    """Experts of some ranks are larger, and leave the budget less: a hit of one is no other's."""
    for host in (100, 2**20):
        assert fcdp.is_cached(of_its_own(named=False, policy=fcdp.Budget(host=host), sizes=True))
    with pytest.raises(ValueError, match=r"by the tiers of its units: differs between ranks"):
        of_its_own(named=False, policy=fcdp.Budget(host=400), sizes=True)


@on_ranks(4)
def test_where_a_rank_made_a_group_alone_all_ranks_are_refused_or_none() -> None:
    """Up to torch 2.13 groups of experts' ranks are named by how many groups each rank is in."""
    mesh, topology = meshes(4, 2, False), replace(topology_of(2, 2))
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["efsdp"])
    fully_shard(model, mesh=topology.mesh)
    refusal = ""
    try:
        fcdp.cache_parameters(model, topology)
    except ValueError as error:
        refusal = str(error)
    where = "mesh" if dist.get_rank() % 2 == 0 else "model: rank 0: mesh"
    assert fcdp.is_cached(model) or re.match(f"{where}.*one process group different names", refusal)
    cached = [False] * 4
    dist.all_gather_object(cached, fcdp.is_cached(model))
    assert len({*cached}) == 1


@on_ranks(4)
def test_a_written_expert_is_stale_on_all_ranks() -> None:
    """One rank writes its own experts: those that share them with it gather them anew, too."""
    model = set_up(Layout(2, 2, ep=2), cached=True)
    experts, entries = model[0].mixture.experts, engine_of(model).entries
    with torch.no_grad():
        loss_of(model, 0)
        before = {unit: entry.generation for unit, entry in entries.items()}
        if dist.get_rank() == 2:
            experts.up.to_local().mul_(0.5)
        fcdp.ledger(model).reset()
        loss_of(model, 1)
    written = [unit.name for unit, entry in entries.items() if entry.generation > before[unit]]
    assert (written, fcdp.ledger(model).misses) == (["0.mixture.experts"], 1)


@pytest.mark.parametrize(
    "ranks_of",
    [
        pytest.param([[0, 1], [2, 3], [4, 5]], id="one pair of three is on both nodes"),
        pytest.param([[0, 3], [4, 1], [2, 5]], id="one pair of three descends"),
    ],
)
@on_ranks(6)
def test_meshes_that_lie_unlike_on_the_nodes_are_refused_on_all_ranks(
    ranks_of: list[list[int]],
) -> None:
    pairs = DeviceMesh("cpu", torch.tensor(ranks_of), mesh_dim_names=("ep", "efsdp"))
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0], mesh=pairs["efsdp"])
    topology = topology_of(2, 3)
    fully_shard(model, mesh=topology.mesh)
    mine = pairs["efsdp"].mesh.tolist()
    with pytest.raises(ValueError, match=f"^0: sharded over ranks {re.escape(str(mine))}; must be"):
        fcdp.cache_parameters(model, topology)
    assert not fcdp.is_cached(model)


@on_ranks(4)
def test_models_on_equal_meshes_share_process_groups() -> None:
    """Groups live as long as the process."""
    first = set_up(Layout(2, 2, ep=2), cached=True)
    groups = len(dist.distributed_c10d._world.pg_names)
    second = set_up(Layout(2, 2, ep=2), cached=True)
    assert len(dist.distributed_c10d._world.pg_names) == groups
    one, other = ([unit.topology for unit in engine_of(each).units] for each in (first, second))
    assert one == other


@on_ranks(4)
def test_a_model_that_no_gather_of_crosses_nodes_is_refused() -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match=r"^model: each of its units is sharded within one node"):
        fcdp.cache_parameters(model, topology_of(2, 2))


class Decoder(nn.Module):
    """A mixture of experts of transformers, which is given embeddings."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), WIDTH),
            moe_intermediate_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            use_cache=False,
        )
        self.model: Any = Qwen3MoeForCausalLM(config)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(inputs_embeds=embeddings[None]).logits
        return logits


def of_transformers(*, cached: bool) -> list[tuple[str, Any]]:
    torch.manual_seed(0)
    topology, model = topology_of(2, 1), Decoder()
    layers = model.model.model.layers
    for module in [*(layer.mlp.experts for layer in layers), *layers, model]:
        fully_shard(module, mesh=topology.mesh)
    for layer in layers:
        layer.mlp.experts.requires_grad_(requires_grad=False)
    if cached:
        fcdp.cache_parameters(model, topology)
    seen = train(model, {2: 2})
    if cached:
        units = engine_of(model).units
        crossed = sum(u.shard_bytes * (STEPS if u.trainable else 1) for u in units)
        assert fcdp.ledger(model).snapshot()["inter_node"]["forward"] == crossed
    return seen


@on_ranks(2)
def test_frozen_experts_of_transformers_cross_once_and_training_equals_fsdp2_to_the_bit() -> None:
    assert not differences(of_transformers(cached=False), of_transformers(cached=True), EXACT)
