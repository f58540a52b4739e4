"""Whether FCDP trains as FSDP2 does, policy by policy and codec by codec: the ranks' side."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fcdp
from scripts.gpu import fake
from scripts.gpu.rank import Rank
from scripts.gpu.training import Recipe, Trained, deterministic, train

CODECS: dict[str, fcdp.Codec] = {"int8": fcdp.BlockInt8(), "int4": fcdp.BlockInt4()}
#: How far a lossy run's losses may be from FSDP2's, relative, in the few steps that are trained.
BOUNDS = {"int8": 0.03, "int4": 0.25}
POLICIES = (
    "none",
    "device",
    "host",
    "disk",
    "threshold-0",
    "threshold-1",
    "budget",
    "auto",
)


@dataclass(frozen=True)
class Case:
    """One comparison: ``policy`` against FSDP2, or, with a codec, against no cache."""

    policy: str
    tuning: str
    codec: str | None = None

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.policy, self.tuning, self.codec)))


def cases(small: bool) -> list[Case]:
    """In the order of what matters most, FSDP2 against itself first."""
    lora = ("host",) if small else POLICIES
    return [
        Case("fsdp2", "full"),
        Case("fsdp2", "lora"),
        *(Case(policy, "full") for policy in POLICIES),
        *(Case(policy, "lora") for policy in lora),
        *(Case(policy, "full", "int8") for policy in (("none", "host") if small else POLICIES)),
        *(Case(policy, "full", "int4") for policy in (() if small else POLICIES)),
    ]


def on_this_rank(rank: Rank) -> None:
    """Run the cases that are asked for, by index, and answer each with a line."""
    deterministic()
    asked = cases(rank.brief["small"])[rank.brief["first"] :]
    with _topology(rank) as topology, tempfile.TemporaryDirectory() as folder:
        compare = _Comparison(rank, topology, Path(folder))
        for case in asked:
            rank.answer(compare.of(case))


@contextlib.contextmanager
def _topology(rank: Rank) -> Iterator[fcdp.Topology]:
    nodes, ranks_per_node = rank.brief["topology"]
    if rank.brief["fake"]:
        with fake.world(nodes, ranks_per_node, rank.device.type) as topology:
            yield topology
    else:
        yield fcdp.Topology.build(nodes, ranks_per_node, rank.device.type)


class _Comparison:
    """Trains what is asked, and the references once each."""

    def __init__(self, rank: Rank, topology: fcdp.Topology, folder: Path) -> None:
        self._rank = rank
        self._topology = topology
        self._folder = folder
        self._references: dict[Case, Trained] = {}

    def of(self, case: Case) -> dict[str, Any]:
        exact = self._reference(Case("fsdp2", case.tuning))
        expected = exact if case.codec is None else self._reference(replace(case, policy="none"))
        found = self._train(case)
        return {
            "case": case.name,
            "equal": found.equals(expected),
            "distance": found.distance(exact),
            "hits": found.hits,
            "trains": len(set(exact.losses)) > 1,
        }

    def _reference(self, case: Case) -> Trained:
        if case not in self._references:
            self._references[case] = self._train(case)
        return self._references[case]

    def _train(self, case: Case) -> Trained:
        codec = None if case.codec is None else CODECS[case.codec]
        recipe = Recipe(
            None if case.policy == "fsdp2" else self._policy(case.policy),
            lora=case.tuning == "lora",
            gather_codec=codec,
            reduce_codec=codec,
            param_dtype=torch.bfloat16,
            force_sums=self._rank.brief["fake"],
        )
        return train(recipe, self._topology, self._rank.device)

    def _policy(self, name: str) -> fcdp.CachePolicy:
        policies: dict[str, fcdp.CachePolicy] = {
            "none": fcdp.NoCache(),
            "device": fcdp.DeviceCache(),
            "host": fcdp.HostCache(),
            "disk": fcdp.DiskCache(self._folder),
            "threshold-0": fcdp.Threshold(0.0),
            "threshold-1": fcdp.Threshold(1.0),
            # A unit or so in each tier.
            "budget": fcdp.Budget(14_000, 14_000, 14_000, directory=self._folder),
            "auto": fcdp.Auto(measured_gathers=2),
        }
        return policies[name]
