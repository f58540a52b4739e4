"""Training as FSDP2 trains: policy by policy, codec by codec, world by world.

Worlds of real ranks share one GPU as separate hosts, between them sockets of the loopback: NCCL
refuses two ranks of one host on one GPU. They take turns on it, so that this says nothing of speed:
it says that nothing hangs, and that losses are FSDP2's. An imitated world is quick, and keeps the
device as busy as one rank of sixteen does.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcdp
from fcdp.cache import named
from scripts import fake_world
from tests.fcdp import training
from tests.fcdp.checkpoints import Run
from tests.fcdp.cuda.alone import DEVICE, ON_GPU
from tests.fcdp.peer_copies import PeerCopies
from tests.fcdp.training import Result, Settings
from tests.ranks import Pools, RankFailure

pytestmark = pytest.mark.gpu

#: Codecs of gathers, and how far a run's losses may be from FSDP2's, relative, in the few steps of
#: a training. A lossy one serves for reductions too.
CODECS: dict[str | None, tuple[Any, float]] = {
    None: (None, 0.0),
    "int8": (fcdp.BlockInt8(), 0.03),
    "int4": (fcdp.BlockInt4(), 0.25),
    "delta": (fcdp.Delta(), 0.0),
}
#: More than two summands have more than one order, and micro-batches are added before ranks.
TOLERANCE = 1e-4
BUDGET = "budget(device=UNIT, host=UNIT, disk=UNIT)"
POLICIES = ("none", "device", "host", "disk", "threshold(0)", "threshold(1)", BUDGET, "auto")
#: Each rank is a host of its own, and what hosts have between them is sockets.
SEPARATE_HOSTS = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_MNNVL_ENABLE", "NCCL_NVLS_ENABLE"), "0"),
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    # The ranks take turns on the GPU: more channels would not be faster, and are more to start.
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "WARN",
}


@dataclass(frozen=True)
class World:
    nodes: int
    ranks_per_node: int
    #: One rank is real; the others do as it does.
    imitated: bool = False

    @property
    def processes(self) -> int:
        return 1 if self.imitated else self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{'imitated-' * self.imitated}{self.nodes}x{self.ranks_per_node}"


IMITATED, PAIR, SQUARE, CHAIN = World(2, 8, True), World(2, 1), World(2, 2), World(4, 1)


@dataclass(frozen=True)
class Case:
    """One comparison: ``policy`` against FSDP2, or, with a codec, against no cache."""

    policy: str
    tuning: str = "full"
    codec: str | None = None
    micro_batches: int = 1
    #: How a parameter's class gathers it: ``tests.fcdp.extended``.
    extension: str | None = None
    #: Whether gathers inside the node are copies out of the other ranks' memory.
    copies: bool = False

    def __str__(self) -> str:
        how = f"{self.extension}_extension" if self.extension else self.codec or "exact"
        how = "peer_copies" if self.copies else how
        return f"{self.policy}-{self.tuning}-{how}-{self.micro_batches}"


def cases() -> Iterator[Any]:
    """All that is compared, in the order of what matters most; a few of each on the CPU."""
    policies = POLICIES if ON_GPU else ("none", "host")
    for world in (IMITATED, PAIR):
        for tuning, codec in (
            ("full", None),
            ("lora", None),
            ("full", "delta"),
            ("full", "int8"),
            ("full", "int4"),
        ):
            for policy in policies:
                yield case(world, policy, tuning, codec)
    for extension in ("packed", "rounded"):
        yield case(PAIR, "host", "lora", extension=extension)
    yield case(SQUARE, "host", "full", copies=True)
    for world, counts in ((PAIR, (2,)), (SQUARE, (1, 2)), (CHAIN, (1, 2))):
        for count in counts:
            for tuning in ("full", "lora"):
                yield case(world, "host", tuning, None, count)


def case(
    world: World,
    policy: str,
    tuning: str,
    codec: str | None = None,
    count: int = 1,
    extension: str | None = None,
    copies: bool = False,
) -> Any:
    """A parameter: with pytest's ``-n`` one process takes what follows in one world."""
    group = pytest.mark.xdist_group(f"{world} {codec or tuning}")
    return pytest.param(world, Case(policy, tuning, codec, count, extension, copies), marks=group)


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[tuple[World, Pools]]:
    asked: World = request.param
    with contextlib.closing(Pools(functools.partial(join, asked))) as pools:
        try:
            pools.run(asked.processes, compared, asked, Case("fsdp2"), timeout_s=100)
        except RankFailure as failure:
            if not ON_GPU:
                raise
            pytest.skip(f"FSDP2 alone does not run there: {failure}")
        yield asked, pools


@pytest.mark.parametrize(("world", "case"), [*cases()], indirect=["world"], ids=str)
def test_losses_and_parameters_are_fsdp2s(world: tuple[World, Pools], case: Case) -> None:
    asked, pools = world
    one_order = (asked.imitated or asked.processes == 2) and case.micro_batches == 1
    for each in pools.run(asked.processes, compared, asked, case, timeout_s=60):
        assert each["equal"] if one_order else each["distance"] <= TOLERANCE, each
        # Where a cache served nothing, being equal says nothing of it.
        assert case.policy == "none" or each["hits"]
        assert case.codec is None or each["distance"] <= CODECS[case.codec][1]


def test_a_save_in_the_background_has_the_state_of_its_moment(tmp_path: Path) -> None:
    with contextlib.closing(Pools(functools.partial(join, PAIR))) as pools:
        for resumed, losses in pools.run(2, resumed_and_not, tmp_path, timeout_s=100):
            assert resumed == losses


def resumed_and_not(directory: Path) -> tuple[list[float], list[float]]:
    run, resumed = Run(), Run(seed=1)
    run.train(2)
    saving = run.save(directory, asynchronous=True)
    losses = run.train(3)
    saving.result()
    resumed.load(directory)
    return resumed.train(3), losses


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_lost_rank_ends_the_others(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits there, not the host: the thread has to look, and to abort what waits."""
    monkeypatch.setattr("tests.ranks._GRACE_S", 60)
    pools = contextlib.closing(Pools(functools.partial(join, PAIR)))
    with pytest.raises(RankFailure) as lost, pools as ranks:
        ranks.run(2, train_until_lost, how, timeout_s=100)
    of_0, of_1 = str(lost.value).split("rank 1:\n")
    if how == "raises":
        assert "no label" in of_1
        assert "RankFailed: rank 1 failed: ValueError: invalid literal" in of_0
    else:
        assert "has ended" in of_1
        assert "one was killed" in of_0 or (ON_GPU and "has ended" in of_0), of_0


def train_until_lost(how: str) -> None:
    """NCCL's own watchdog may end a process whose peer is gone."""
    run = Run()
    run.train(2)
    if dist.get_rank() == 1:
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        run.model.register_forward_pre_hook(lambda *_: int("no label"))
    while True:
        run.train(1)


def compared(world: World, case: Case) -> dict[str, Any]:
    """This rank's losses and parameters beside the references'."""
    exact = trained(world, replace(case, policy="fsdp2", codec=None, copies=False))
    plain = exact if case.codec is None else trained(world, replace(case, policy="none"))
    cached = trained(world, case)
    pairs, params = zip(cached.losses, exact.losses, strict=True), cached.params.items()
    same = all(torch.equal(param, plain.params[name]) for name, param in params)
    return {
        "equal": same and cached.losses == plain.losses,  # a NaN equals nothing
        "distance": max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs),
        "hits": cached.hits,
    }


_joined = contextlib.ExitStack()


def join(world: World, rank: int, world_size: int, store: Path) -> None:
    """Join the world as a rank whose kernels add in one order."""
    torch.set_default_device(DEVICE)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill each new tensor on the device: an order of operations that nobody trains with.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if world.imitated:
        _joined.enter_context(fake_world.world(world.nodes, world.ranks_per_node, DEVICE.type))
        return
    os.environ |= SEPARATE_HOSTS | {"NCCL_HOSTID": f"fcdp-{rank}"}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPU else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
    )


@functools.cache
def trained(world: World, case: Case) -> Result:
    codec, _ = CODECS[case.codec]
    is_fsdp2 = case.policy == "fsdp2"
    settings = Settings(
        nodes=world.nodes,
        ranks_per_node=world.ranks_per_node,
        adapter_rank=3 if case.tuning == "lora" else 0,
        extension=case.extension,
        accumulation=case.micro_batches,
        param_dtype=None if case.extension else torch.bfloat16,  # a class has its own
        reduce_dtype=torch.float32,
        policy=fcdp.NoCache() if is_fsdp2 else policy(case.policy, world),
        gather_codec=codec,
        reduce_codec=None if case.codec == "delta" else codec,
        intra_node=PeerCopies() if case.copies and not is_fsdp2 else None,
    )
    return training.train(settings, "fsdp2" if is_fsdp2 else "fcdp")


def policy(name: str, world: World) -> fcdp.CachePolicy:
    if name == "auto":
        return fcdp.Auto(measured_gathers=2)
    return named.parse(name.replace("UNIT", f"{800 // world.ranks_per_node} B"))  # or so
