"""Random walks beside FSDP2 of ten seeds, of 200 with ``--exhaustive``.

On an accelerator of three, and of as many as 200 too: each is right in every schedule, or fails. A
product of walks that train alone has every policy on every topology.

And that a walk notices what it is there for.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.fcdp.on_streams import OnStreams
from tests.fcdp.releases import since_2_13
from tests.fcdp.walk.drive import Event, Handler, Walk, WalkFailed
from tests.fcdp.walk.options import POLICIES, SHAPES, Options, draw_options
from tests.fcdp.walk.pair import Side
from tests.fcdp.walk.seeds import (
    HANDLERS,
    Case,
    draw,
    draw_on_an_accelerator,
    kinds_here,
    run,
    walk_on_rank,
)
from tests.ranks import Pools


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", _seeds(metafunc, "seed{:03}", 10))
    if "accelerator_seed" in metafunc.fixturenames:
        metafunc.parametrize("accelerator_seed", _seeds(metafunc, "{}", 3))


def _seeds(metafunc: pytest.Metafunc, name: str, usual: int) -> list[Any]:
    """Seeds by number."""
    number = 200 if metafunc.config.getoption("--exhaustive") else usual
    return [pytest.param(seed, id=name.format(seed)) for seed in range(number)]


def test_a_walk_equals_that_of_fsdp2(ranks: Pools, seed: int, tmp_path: Path) -> None:
    failure = run(ranks, draw(seed), tmp_path)
    again = f"pytest tests/fcdp/test_walk.py --exhaustive -k seed{seed:03}"
    assert failure is None, f"{failure}\nagain: {again}"


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), *SHAPES, (2, 3)], ids=str)
def test_every_policy_trains_as_fsdp2_on_every_topology(
    ranks: Pools, shape: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The other options are drawn. An entry that is read too late or too early gives NaN, too."""
    nodes, ranks_per_node = shape
    events = Event("accumulate", 1), Event("train", 2)
    draws = 12 if request.config.getoption("--exhaustive") else 1
    for number, policy in enumerate([*POLICIES] * draws, 1000 * nodes + 100 * ranks_per_node):
        options = replace(draw_options(number), policy=policy, verify=True, poison=True)
        options = replace(options, nodes=nodes, ranks_per_node=ranks_per_node)
        failure = run(ranks, Case(number, options, events), tmp_path)
        assert failure is None, failure


def test_a_walk_on_an_accelerator_equals_that_of_fsdp2(
    apart: Pools, accelerator_seed: int, tmp_path: Path
) -> None:
    case = draw_on_an_accelerator(accelerator_seed)
    failure = run(OnStreams(apart, schedules=2, seed=case.seed), case, tmp_path)
    assert failure is None, failure


#: Walks that once went wrong, by number: on an accelerator or not, and what was done.
MENDED: dict[int, tuple[bool, Options, dict[str, int]]] = {
    # A refused micro-batch leaves memory to which a stream still writes: its refusal lets go of
    # what FSDP2 holds, for whatever the next pass computes.
    53: (
        True,
        Options(),
        {"freeze": 872495, "micro": 582145, "thaw": 75571, "backward": 727399, "evaluate": 1},
    ),
    # A later gradient has what a backward that raised has left: adapters of all blocks are one
    # unit, of which no part has been reduced when it raises.
    172: (
        False,
        Options(setup="shard", adapter_rank=1, frozen=True, policy="host"),
        {"train": 637911, "boom_in_backward": 433330, "backward": 529913},
    ),
    # A model that was converted is not gathered anew: its parameters are new tensors, whose
    # writes happen to add up to what they did before.
    221: (
        True,
        Options(policy="device", width=6, adapter_rank=3, look_ahead=2, detect_writes=False),
        {"rebuild": 696658, "evaluate": 267604, "convert": 448672, "train": 232008},
    ),
}


@since_2_13
@pytest.mark.parametrize("seed_of_old", MENDED)
def test_what_was_mended_stays_so(
    ranks: Pools, apart: Pools, seed_of_old: int, tmp_path: Path
) -> None:
    on_an_accelerator, options, kinds = MENDED[seed_of_old]
    case = Case(seed_of_old, options, tuple(Event(kind, seed) for kind, seed in kinds.items()))
    streams = OnStreams(apart, schedules=2, seed=seed_of_old)
    failure = run(streams if on_an_accelerator else ranks, case, tmp_path)
    assert failure is None, failure


def shard_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    local: torch.Tensor = tensor.to_local()
    return local.detach()


def old_parameters(walk: Walk) -> None:
    """FCDP's copy computes once with a parameter that is hardly off on the last rank."""
    tokens = walk.tokens()

    def loss(side: Side) -> torch.Tensor:
        shard = shard_of(side.params["blocks.1.up.weight"])
        backup = shard.clone()
        if side.cached and walk.rank == walk.options.world_size - 1:
            shard += 2**-40
        with torch.no_grad():
            logits: torch.Tensor = side.model(tokens[:, :-1])
        side.reshard()
        shard.copy_(backup)
        return logits

    walk.both("logits", loss)


def other_gradient(walk: Walk) -> None:
    """One rank's part of one gradient is one unit off."""
    walk.backward("plain")
    if walk.rank == 0:
        grad = walk.pair.cached.params["blocks.1.up.weight"].grad
        shard_of(grad).view(-1)[0] += walk.options.unit


def lost_state(walk: Walk) -> None:
    walk.pair.cached.optimizer.state.clear()


def refusal_on_one_rank(walk: Walk) -> None:
    def refuse() -> None:
        if walk.rank == 1:
            raise RuntimeError("blocks.1: parameters were written; call fcdp.invalidate(model)")

    walk.attempt(refuse)


#: By name: the sabotage, and the problem that it causes.
SABOTAGES: dict[str, tuple[Handler, str]] = {
    "old parameters": (old_parameters, "logits: differs by up to"),
    "other gradient": (other_gradient, "blocks.1.up.weight.grad: differs by up to"),
    "lost state": (lost_state, "optimizer state []"),
    "refusal on one rank": (refusal_on_one_rank, "refused on ranks [1] alone"),
}


def problem_of(options: Options, sabotage: str, directory: Path) -> str:
    """Return the problem that a walk reports where its last event but one was sabotaged."""
    events = [Event("train", 1), Event("train", 2), Event(sabotage, 3), Event("train", 4)]
    HANDLERS[sabotage], _ = SABOTAGES[sabotage]
    try:
        walk_on_rank(options, events, directory)
    except WalkFailed as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_walk_notices(ranks: Pools, tmp_path: Path, sabotage: str) -> None:
    options = Options(policy="none", optimizer="momentum")
    answers = ranks.run(2, problem_of, options, sabotage, tmp_path)
    assert all(answer.startswith(f"event 2, {sabotage}:3") for answer in answers), answers
    assert any(SABOTAGES[sabotage][1] in answer for answer in answers), answers


def test_seeds_draw_every_shape_and_every_kind_of_event() -> None:
    cases = [draw(seed) for seed in range(30)]
    assert {(c.options.nodes, c.options.ranks_per_node) for c in cases} == {*SHAPES}
    assert {event.kind for case in cases for event in case.events} == kinds_here()
    assert draw(7) == draw(7) != draw(8)
    assert draw(7).options == draw_options(7)
