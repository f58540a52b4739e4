"""Whether FCDP trains as FSDP2 does: policy by policy, codec by codec, world by world.

The worlds of real ranks share one GPU as separate hosts, between them sockets of the loopback: NCCL
refuses two ranks of one host on one GPU. They take turns on it, so that this says nothing of speed:
it says that nothing hangs, and that losses are FSDP2's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

import fcdp
from scripts.gpu import fake, ranks
from scripts.gpu.ranks import Rank
from scripts.gpu.records import Brief, Deadline, Record
from tests.fcdp import training
from tests.fcdp.training import Result, Settings

CODECS: dict[str, fcdp.Codec] = {"int8": fcdp.BlockInt8(), "int4": fcdp.BlockInt4()}
#: How far a lossy run's losses may be from FSDP2's, relative, in the few steps that are trained.
BOUNDS = {"int8": 0.03, "int4": 0.25}
#: More than two summands have more than one order, and micro-batches are added before ranks.
_TOLERANCE = 1e-4
POLICIES = ("none", "device", "host", "disk", "threshold-0", "threshold-1", "budget", "auto")
#: After a hang or a crash the cases behind it get new ranks, so often.
_RESTARTS = 3
#: Under this no ranks are started.
_LEAST_S = 20.0


@dataclass(frozen=True)
class Case:
    """One comparison: ``policy`` against FSDP2, or, with a codec, against no cache."""

    policy: str
    tuning: str = "full"
    codec: str | None = None
    micro_batches: int = 1

    @property
    def name(self) -> str:
        batches = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else None
        return "/".join(filter(None, (self.policy, self.tuning, self.codec, batches)))


@dataclass(frozen=True)
class World:
    nodes: int
    ranks_per_node: int
    #: One rank is real; the others do as it does.
    imitated: bool = False

    @property
    def name(self) -> str:
        return f"{'imitated ' * self.imitated}{self.nodes} × {self.ranks_per_node}"

    def is_exact(self, case: Case) -> bool:
        """Whether sums have one order, so that equal means bit for bit."""
        one_order = self.imitated or self.nodes * self.ranks_per_node == 2
        return one_order and case.micro_batches == 1


#: On one GPU a world of real ranks takes turns: the imitated one is quick, and keeps the device as
#: busy as one rank of sixteen does. It goes first: NCCL may refuse the other.
IMITATED, PAIR = World(2, 8, imitated=True), World(2, 1)
WORLDS = (PAIR, World(2, 2), World(4, 1))


def policies(small: bool) -> list[Case]:
    """All policies and codecs, in the order of what matters most, FSDP2 against itself first."""
    few = ("none", "host")
    return [
        Case("fsdp2", "full"),
        Case("fsdp2", "lora"),
        *(Case(policy, "full") for policy in POLICIES),
        *(Case(policy, "lora") for policy in (few[1:] if small else POLICIES)),
        *(Case(policy, "full", "int8") for policy in (few if small else POLICIES)),
        *(Case(policy, "full", "int4") for policy in (() if small else POLICIES)),
    ]


def tunings(small: bool) -> list[Case]:
    """The host cache, for both kinds of tuning, with one and two micro-batches."""
    cases = [Case("host", tuning, None, k) for k in (1, 2) for tuning in ("full", "lora")]
    return [cases[0], cases[-1]] if small else cases


def compare(
    record: Record, brief: Brief, world: World, cases: Sequence[Case], limit_s: float
) -> None:
    """Train the cases on the ranks of ``world``, within ``limit_s``."""
    found, broken = _run(brief, world, cases, limit_s)
    record.details[world.name] = {
        "transport": "gloo" if brief.device == "cpu" else "NCCL, ranks that share a GPU",
        "cases": {case.name: line for case, line in found.items()},
        "broken": {case.name: why for case, why in broken.items()},
    }
    judge(record, world, found, broken)


#: By case: what its ranks answer together, or why they do not.
Lines = dict[Case, dict[str, Any]]
Broken = dict[Case, str]


def _run(brief: Brief, world: World, cases: Sequence[Case], limit_s: float) -> tuple[Lines, Broken]:
    deadline, first = Deadline(limit_s), 0
    found, broken = Lines(), Broken()
    for _ in range(1 + _RESTARTS):
        if first == len(cases) or deadline.left() < min(_LEAST_S, limit_s / 2):
            break
        outcome = ranks.run(
            on_this_rank,
            {"world": world, "cases": cases[first:]},
            world_size=1 if world.imitated else world.nodes * world.ranks_per_node,
            device=brief.device,
            limit_s=deadline.left(),
            apart=True,
        )
        answers = [*zip(*outcome.lines, strict=False)]  # those that all ranks have given
        found |= dict(zip(cases[first:], map(together, answers), strict=False))
        first += len(answers)
        if outcome.state != "ended" and first < len(cases):
            broken[cases[first]] = str(outcome)
            first += 1
            if cases[first - 1].policy == "fsdp2":
                break  # without FCDP: this world cannot be had here
    return found, broken | dict.fromkeys(cases[first:], "not reached in time")


def together(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' lines as one: equal where all are, and as far and as idle as any."""
    return {
        **lines[0],
        "equal": all(line["equal"] for line in lines),
        "distance": max(line["distance"] for line in lines),
        "hits": min(line["hits"] for line in lines),
    }


def judge(record: Record, world: World, found: Lines, broken: Broken) -> None:
    """Turn what came of the cases into a check each."""
    refused = [why for case, why in broken.items() if case.policy == "fsdp2"]
    if refused:
        record.not_measured(
            f"parity on {world.name}", f"FSDP2 alone does not run there: {refused[0]}"
        )
        return
    equal = 0
    for case, line in found.items():
        exact, distance = world.is_exact(case), line["distance"]
        same = line["equal"] if exact else distance <= _TOLERANCE
        # Where a cache served nothing, being equal says nothing of it.
        works = line["trains"] if case.policy == "fsdp2" else case.policy == "none" or line["hits"]
        near = case.codec is None or distance <= BOUNDS[case.codec]
        to = "FSDP2" if case.codec is None else "no cache, and losses near FSDP2's"
        how = "bit for bit" if exact else "but for the order of sums"
        equal += same
        record.passed_if(
            bool(same and works and near),
            f"{case.name} on {world.name}: equal to {to}, {how}",
            f"{distance:.1e} from FSDP2's losses, {line['hits']} gathers served",
        )
    for case, why in broken.items():
        record.failed(f"{case.name} on {world.name}: no hang and no crash", why)
    record.figures[f"equal on {world.name}"] = f"{equal} of {len(found) + len(broken)}"


def on_this_rank(rank: Rank) -> None:
    """Train the cases that are asked for, and answer each with a line."""
    _be_deterministic()
    world: World = rank.brief["world"]
    size = world.nodes, world.ranks_per_node
    with contextlib.ExitStack() as stack:
        topology = (
            stack.enter_context(fake.world(*size, rank.device.type))
            if world.imitated
            else rank.join(*size)
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trained = _Trained(rank, topology, folder)
        for case in rank.brief["cases"]:
            rank.answer(trained.compared(case))


def _be_deterministic() -> None:
    """Have every kernel add in one order. Before the first product on the device."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill each new tensor on the device: an order of operations that nobody trains with.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class _Trained:
    """Trains what is asked on this rank, and the references once each."""

    def __init__(self, rank: Rank, topology: fcdp.Topology, folder: Path) -> None:
        self._rank = rank
        self._topology = topology
        self._folder = folder
        self._references: dict[Case, Result] = {}

    def compared(self, case: Case) -> dict[str, Any]:
        exact = self._reference(replace(case, policy="fsdp2", codec=None))
        expected = exact if case.codec is None else self._reference(replace(case, policy="none"))
        found = self._train(case)
        pairs, params = zip(found.losses, exact.losses, strict=True), found.params.items()
        return {
            "case": case.name,
            # A NaN equals nothing.
            "equal": found.losses == expected.losses
            and all(torch.equal(param, expected.params[name]) for name, param in params),
            "distance": max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs),
            "hits": found.hits,
            "trains": len(set(exact.losses)) > 1,
            "losses": found.losses,
            "fsdp2_losses": exact.losses,
        }

    def _reference(self, case: Case) -> Result:
        if case not in self._references:
            self._references[case] = self._train(case)
        return self._references[case]

    def _train(self, case: Case) -> Result:
        device, is_fsdp2 = self._rank.device, case.policy == "fsdp2"
        codec = None if case.codec is None else CODECS[case.codec]
        settings = Settings(
            adapter_rank=3 if case.tuning == "lora" else 0,
            accumulation=case.micro_batches,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            policy=fcdp.NoCache() if is_fsdp2 else self._policy(case.policy),
            gather_codec=codec,
            reduce_codec=codec,
        )
        # Made on the host: the same numbers on every device.
        model = training.make_model(settings).to(device)
        shard = training.shard_with_fsdp2 if is_fsdp2 else training.shard_with_fcdp
        shard(model, self._topology, settings)
        for part in model.modules() if self._rank.brief["world"].imitated else ():
            if isinstance(part, FSDPModule):  # sums are this rank's own: both must divide alike
                part.set_force_sum_reduction_for_comms(True)
        optimizer = training.make_optimizer(model, settings)
        data = training.batches(settings, self._topology.rank)
        losses = []
        for _ in range(settings.steps):
            total = 0.0
            for micro in range(case.micro_batches):
                defer: Any = contextlib.nullcontext()
                if case.micro_batches > 1 and not is_fsdp2:
                    defer = fcdp.accumulate(model, last=micro == case.micro_batches - 1)
                with defer:
                    loss = training.loss_of(model, next(data).to(device)) / case.micro_batches
                    loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        params = {
            name: training.whole(param).detach().cpu() for name, param in model.named_parameters()
        }
        return Result(losses, [], params, None, 0 if is_fsdp2 else fcdp.ledger(model).hits)

    def _policy(self, name: str) -> fcdp.CachePolicy:
        a_unit = 800 // self._topology.ranks_per_node  # or so, in bytes
        policies: dict[str, fcdp.CachePolicy] = {
            "none": fcdp.NoCache(),
            "device": fcdp.DeviceCache(),
            "host": fcdp.HostCache(),
            "disk": fcdp.DiskCache(self._folder),
            "threshold-0": fcdp.Threshold(0.0),
            "threshold-1": fcdp.Threshold(1.0),
            "budget": fcdp.Budget(a_unit, a_unit, a_unit, directory=self._folder),
            "auto": fcdp.Auto(measured_gathers=2),
        }
        return policies[name]
