"""Objectives: equal under all strategies, the bytes of generation, messages for mistakes."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from baselines.strategy import Measure
from experiments.records.cell import Cell
from experiments.records.objective import DPO, GRPO, AnyObjective, Distillation, OwnObjective
from experiments.worker import models, objectives
from experiments.worker.objectives import own
from experiments.worker.worker import _Training
from fcdp.failure import break_all, every_backend
from tests.experiments import own_model
from tests.experiments.cells import cell, model_spec
from tests.fcdp.training import topology_of
from tests.ranks import Pools, RankFailure

SMALL = model_spec("gpt2", layers=2, width=32, heads=2)
ANSWERS = GRPO(kind="grpo", new_tokens=6, group=4)
OWN = "tests.experiments.own_model"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": DPO(kind="dpo")},
    "dpo-lora": {"objective": DPO(kind="dpo"), "tuning": "lora"},
    "grpo": {"objective": ANSWERS, "accumulation": 2},
    "grpo-lora": {"objective": ANSWERS, "tuning": "lora"},
    "grpo-epochs": {
        "objective": ANSWERS.model_copy(update={"epochs": 2, "end_token": 10, "reward": "copy"})
    },
    "distillation": {
        "objective": Distillation(
            kind="distillation", teacher=model_spec("llama", layers=1, width=64), temperature=2.0
        )
    },
    "own": {"objective": OwnObjective(function=f"{OWN}:objective")},
}


def cell_of(strategy: str, **settings: Any) -> Cell:
    usual = {"model": SMALL, "sequence_length": 16, "micro_batch": 4, "learning_rate": 1e-2}
    return cell(strategy, **{**usual, "warmup_steps": 0, **settings})


@dataclass
class Trained:
    losses: list[float]
    rewards: Sequence[float]
    prepared: list[torch.Tensor]
    parameters: list[torch.Tensor]
    #: Bytes between nodes of each iteration by phase of the ledger, where there is one.
    sent: list[dict[str, float]]
    closed_form_bytes: float


def trained(of: Cell, nodes: int, ranks_per_node: int, iterations: int) -> Trained:
    """Iterations of the worker's training on this rank."""
    training = _Training(of, topology_of(nodes, ranks_per_node), Path())
    objective, trainable = training.objective, training.trainable
    assert objective is not None
    prepared: list[torch.Tensor] = []
    prepare = objective.prepare

    def prepare_and_keep(*arguments: Any) -> Sequence[torch.Tensor]:
        batches = prepare(*arguments)
        prepared.extend(batches)
        return batches

    objective.prepare = prepare_and_keep  # type: ignore[method-assign]
    losses, sent = [], []
    for _ in range(iterations):
        losses.append(training._step(training._batches()).item())
        sent.append((trainable.take_ledger() or {}).get("inter_node", {}))
    parameters = training.model.parameters()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    copies = [each.detach().clone() for each in whole]
    closed_form_bytes = trainable.closed_form_bytes
    return Trained(losses, objective.rewards, prepared, copies, sent, closed_form_bytes)


#: Objectives that are seen to learn, which takes iterations.
LEARNING = ("dpo", "distillation", "grpo")


def beside_fsdp2(name: str, iterations: int) -> list[Trained]:
    """By FCDP and FSDP2 on this rank, once also by FSDP2 with what it gathers once to generate."""
    strategies: list[tuple[str, dict[str, Any]]] = [("fcdp", {}), ("fsdp2", {})]
    if name == "grpo-epochs":
        strategies.append(("fsdp2", {"forwards": "unsharded"}))
    return [
        trained(cell_of(strategy, **OBJECTIVES[name], **extra), 2, 1, iterations)
        for strategy, extra in strategies
    ]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_tokens_rewards_and_parameters_are_fsdp2s(ranks: Pools, name: str) -> None:
    """Bit for bit, but for the order in which several micro-batches' gradients are added."""
    iterations, settings = 20 if name in LEARNING else 5, OBJECTIVES[name]
    fcdp, *others = ranks.run(2, beside_fsdp2, name, iterations)[0]
    start, _ = models.build(cell_of("fcdp", **settings))
    near = {"rtol": 1e-3, "atol": 1e-4} if "accumulation" in settings else {"rtol": 0, "atol": 0}
    for other in others:
        assert list(fcdp.rewards) == list(other.rewards)
        tokens = [[part[:, :17] for part in each.prepared] for each in (fcdp, other)]
        torch.testing.assert_close(*tokens, rtol=0, atol=0)
        torch.testing.assert_close(fcdp.prepared, other.prepared, **near)
        torch.testing.assert_close(fcdp.losses, other.losses, **near)
        torch.testing.assert_close(fcdp.parameters, other.parameters, **near)
    moved = zip(fcdp.parameters, start.parameters(), strict=True)
    assert not all(torch.equal(*pair) for pair in moved)
    if name.startswith("grpo"):
        assert len(fcdp.rewards) == iterations
        assert len({*fcdp.rewards}) > 1
    if name == "grpo":
        assert sum(fcdp.rewards[-5:]) > 3 * sum(fcdp.rewards[:5]), "answers become digits"
    if name.startswith("dpo"):
        assert fcdp.losses[0] == pytest.approx(math.log(2), abs=1e-3), "of two equal models"
    if name in ("dpo", "distillation"):
        assert sum(fcdp.losses[-5:]) < 0.95 * sum(fcdp.losses[:5])


def preferring(strategy: str, settings: dict[str, Any]) -> list[float]:
    """Losses of direct preference optimization of a model of four blocks."""
    model = SMALL.model_copy(update={"layers": 4})
    of = cell_of(strategy, model=model, objective=DPO(kind="dpo"), **settings)
    return trained(of, 2, 1, 5).losses


@pytest.mark.parametrize(
    ("common", "settings"),
    [
        ({"tuning": "full", "accumulation": 2}, {}),
        ({"tuning": "lora"}, {"pipeline_schedule": "interleaved", "stages_per_node": 2}),
        ({"tuning": "full"}, {"within_stage": "fcdp"}),
    ],
    ids=str,
)
def test_stages_of_a_pipeline_learn_preferences_as_fsdp2_does(
    ranks: Pools, common: dict[str, Any], settings: dict[str, Any]
) -> None:
    """To rounding: scores come from the last stage, of the reference too."""
    theirs = ranks.run(2, preferring, "fsdp2", common)
    ours = ranks.run(2, preferring, "pipeline", common | settings)
    expected = [sum(losses) / 2 for losses in zip(*theirs, strict=True)]
    for losses in ours:
        assert losses == pytest.approx(expected, rel=1e-4)
    assert len({*expected}) == 5


def test_a_pipeline_hands_floats_of_a_batch_to_its_stages_as_they_are(ranks: Pools) -> None:
    """Scores in bfloat16, as FSDP2 casts a module's inputs, would not be the reference's."""
    first, *_ = ranks.run(2, preferring, "pipeline", {"dtype": "bfloat16"})[0]
    assert first == pytest.approx(math.log(2), abs=1e-5), "of two equal models"


def generating(new_tokens: int) -> Trained:
    objective = GRPO(kind="grpo", new_tokens=new_tokens, group=4)
    return trained(cell_of("fcdp", objective=objective, sequence_length=32), 2, 2, 2)


def test_generation_sends_one_gather_however_long_answers_are(ranks: Pools) -> None:
    """Trained parameters cross once per optimizer step, the reference's once ever."""
    for new_tokens in (2, 8):
        measured = ranks.run(4, generating, new_tokens)[0]
        first, *later = measured.sent
        half = measured.closed_form_bytes / 2
        assert first["forward"] == half
        for sent in later:
            assert sent == {"forward": half, "reduce": half}


def without_room() -> str:
    """The error where the host's memory has no room for the reference."""
    with mock.patch("fcdp.cache.memory.available_host_memory", return_value=1000):
        try:
            trained(cell_of("fcdp", **OBJECTIVES["dpo"]), 2, 1, 1)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_a_reference_that_does_not_fit_is_refused_on_every_rank(ranks: Pools) -> None:
    for error in ranks.run(2, without_room):
        assert "beta: the reference, a frozen copy of all that is trained: " in error
        assert "host memory are free" in error


def apply_to(model: nn.Module, function: Measure, batch: torch.Tensor) -> torch.Tensor:
    return function(model, batch)


def prepared(spec: AnyObjective) -> tuple[float, Sequence[torch.Tensor]]:
    """The first loss of an objective, and what it has prepared, of a model of one process."""
    of = cell_of("fcdp", objective=spec)
    model, blocks = models.build(of)

    def shard(frozen: nn.Module, _: object) -> Any:
        apply = partial(apply_to, frozen)
        return SimpleNamespace(apply=apply, without_gradients=nullcontext, casting=nullcontext)

    objective = objectives.of(of, model, blocks, 0, shard=shard, apply=partial(apply_to, model))
    batch = torch.arange(4 * 17).view(4, 17)
    with torch.no_grad():
        prepared_batches = objective.prepare(model, [batch, batch], lambda phase: None)
        return objective.loss(model, prepared_batches[0]).item(), prepared_batches


@pytest.mark.unit
def test_answers_of_equal_reward_move_nothing_and_what_follows_the_end_does_not_count() -> None:
    """A group without a best answer has advantages of 0, never NaN."""
    alike = ANSWERS.model_copy(update={"reward": f"{OWN}:lengths", "beta": 0.0})
    loss, batches = prepared(alike)
    assert loss == 0
    ends = alike.model_copy(update={"end_token": int(batches[0][0, 12])})
    loss, batches = prepared(ends)
    assert batches[0][:, 18:24][0].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert math.isfinite(loss)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("one_reward_for_all", r"returned \(1,\) for 8 answers; it must return"),
        ("not_a_number", "a tensor with a finite number for each"),
        ("nothing", "own_model' has no attribute 'nothing'"),
    ],
)
def test_a_users_reward_is_checked(reward: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        prepared(ANSWERS.model_copy(update={"reward": f"{OWN}:{reward}"}))


@pytest.mark.unit
def test_a_users_objective_and_a_teacher_are_checked() -> None:
    with pytest.raises(ValueError, match="returned a Model without epochs, rewards, prepare, loss"):
        prepared(OwnObjective(function=f"{OWN}:model_alone"))
    teacher = SMALL.model_copy(update={"vocabulary": 300})
    with pytest.raises(ValueError, match=r"teacher: gpt2-2x32 has a vocabulary of 300 tokens, and"):
        prepared(Distillation(kind="distillation", teacher=teacher))


def unequal(strategy: str, what: str) -> None:
    """An iteration of which rank 1 does something more often; it ends all that a rank waits for."""
    made = own_model.Unequal(what)
    with (
        mock.patch.object(own, "LOOK_S", 0.1),
        mock.patch.object(own_model, "objective", return_value=made),
    ):
        try:
            trained(cell_of(strategy, **OBJECTIVES["own"]), 2, 1, 1)
        except BaseException:
            # As the end of its process would.
            break_all(every_backend())
            raise


#: Ranks that wait for each other: either may be the one that says so.
_WAITS = (
    r"rank . has called the model . times and is .*, another waits at the end of \w+ after 1; must"
)


@pytest.mark.parametrize(
    ("strategy", "what", "problem"),
    [
        ("fcdp", "scored", r"epochs, by rank = \[\(1, 1, 2\), \(2, 1, 2\)\]; must be alike"),
        ("fsdp2", "scored", _WAITS.replace("is .*", "is in a call")),
        ("fcdp", "told", _WAITS),
        ("fcdp", "prepared", r"epochs, by rank = \[\(1, 1, 2\), \(1, 2, 2\)\]; must be alike"),
        ("fcdp", "learnt", "loss calls the model again; it must, once"),
        ("fcdp", "not learnt", "loss has not called the model; it must, once"),
    ],
)
def test_ranks_that_do_not_call_alike_say_so(
    ranks: Pools, strategy: str, what: str, problem: str
) -> None:
    with pytest.raises(RankFailure, match=f"ValueError: objective.function: {OWN}:.*{problem}"):
        ranks.run(2, unequal, strategy, what, timeout_s=60)
