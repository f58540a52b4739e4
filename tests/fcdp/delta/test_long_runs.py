"""Fine-tuning on text with differences, through a checkpoint: bit for bit as without.

The suite takes 12 steps at one learning rate, ``pytest --exhaustive`` 200 at each of three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp
from baselines.strategy import causal_loss
from experiments.worker import data
from tests.fcdp.training import topology_of
from tests.ranks import Pools

RATES = (1e-3, 3e-5, 1e-6)
ACCUMULATION = 2


@dataclass(frozen=True)
class Plan:
    """One run, saved after half of its steps and resumed by another model."""

    learning_rate: float
    steps: int
    gather_codec: fcdp.Delta | None = None


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    params: dict[str, torch.Tensor]
    gathered: int
    """Bytes that this rank sent across nodes in forward and backward gathers, after resuming."""


class Run:
    """A small GPT-2 in bf16, and its optimizer, on this rank."""

    def __init__(self, plan: Plan, seed: int) -> None:
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=256,
            n_positions=32,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model: Any = GPT2LMHeadModel(config)
        fcdp.shard(
            self.model,
            topology_of(2, 2),
            units=list(self.model.transformer.h),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            gather_codec=plan.gather_codec,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=plan.learning_rate, weight_decay=0.1
        )

    def train(self, batches: Any, steps: int) -> list[float]:
        return [self._step(batches) for _ in range(steps)]

    def _step(self, batches: Any) -> float:
        total = 0.0
        for micro in range(ACCUMULATION):
            with fcdp.accumulate(self.model, last=micro == ACCUMULATION - 1):
                loss = causal_loss(self.model, next(batches)) / ACCUMULATION
                loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def fine_tune(plan: Plan, directory: Path) -> Outcome:
    rank = topology_of(2, 2).rank
    batches = data.micro_batches(data.corpus(), rank=rank, seed=7, sequences=2, sequence_length=16)
    first = Run(plan, seed=0)
    losses = first.train(batches, plan.steps // 2)
    fcdp.save(first.model, first.optimizer, directory)
    resumed = Run(plan, seed=1)
    fcdp.load(resumed.model, resumed.optimizer, directory)
    losses += resumed.train(batches, plan.steps - plan.steps // 2)
    params = {
        name: param.full_tensor().detach() for name, param in resumed.model.named_parameters()
    }
    sent = fcdp.ledger(resumed.model).snapshot()["inter_node"]
    return Outcome(losses, params, sum(sent[phase] for phase in sent if phase != "reduce"))


@pytest.mark.parametrize("learning_rate", RATES)
def test_a_resumed_run_is_bit_for_bit_the_one_without(
    ranks: Pools, tmp_path: Path, request: pytest.FixtureRequest, learning_rate: float
) -> None:
    exhaustive = request.config.getoption("--exhaustive")
    if not exhaustive and learning_rate != 3e-5:
        pytest.skip("other learning rates run with --exhaustive")
    raw = Plan(learning_rate, steps=200 if exhaustive else 12)
    told = replace(raw, gather_codec=fcdp.Delta("always"))
    expected = ranks.run(4, fine_tune, raw, tmp_path / "raw", timeout_s=900)
    actual = ranks.run(4, fine_tune, told, tmp_path / "told", timeout_s=900)
    for one, other in zip(actual, expected, strict=True):
        assert one.losses == other.losses
        assert one.params.keys() == other.params.keys()
        for name, param in other.params.items():
            assert torch.equal(one.params[name], param), name
        assert one.gathered < other.gathered
