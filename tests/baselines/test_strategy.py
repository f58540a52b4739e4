"""Strategies by name, and the closed form of ZeRO-3's bytes."""

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from baselines import registry, strategy
from baselines.registry import STRATEGY_NAMES
from baselines.settings import CacheSettings, EncodedSettings, Settings
from baselines.strategy import Job
from tests import programs
from tests.baselines.jobs import alone, job

#: A vendor's engine may be missing, or slow to import: only its own strategy may need it.
ENGINES = ("deepspeed", "transformers", "peft")


class Model(nn.Module):
    """Equal blocks, and an embedding that is also the head."""

    def __init__(self, blocks: int = 3, width: int = 4, vocabulary: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight


def job_of(model: Model, **own: Any) -> Job:
    return job(alone(), model.blocks, **own)


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_every_strategy_loads(name: str) -> None:
    build = strategy.load(name)
    parameters = inspect.signature(build).parameters.values()
    assert [p.name for p in parameters if p.default is p.empty] == ["model", "job"]
    assert build.__module__ == registry.find(name).builder[0]


CODEC, POLICY = EncodedSettings(gather_codec="int8(128)"), CacheSettings(policy="device")


@pytest.mark.parametrize(
    ("name", "chosen", "reason"),
    [
        ("zeropp", CODEC, r"gather_codec = 'int8\(128\)': zeropp has its own, int8"),
        ("zero3", POLICY, "policy = 'device': zero3 has its own, none; allowed are gather_codec, "),
        ("fsdp2", POLICY, "policy = 'device': fsdp2 has none; allowed are forwards"),
    ],
)
def test_what_builds_a_strategy_refuses_what_it_does_not_leave(
    name: str, chosen: Settings, reason: str
) -> None:
    model = Model()
    with pytest.raises(ValueError, match=reason):
        strategy.load(name)(model, job_of(model, settings=chosen))


def test_what_takes_the_place_of_gloos_collectives_is_refused_on_an_accelerator() -> None:
    model = Model()
    here = job(alone(mesh=SimpleNamespace(device_type="cuda")), model.blocks)
    with pytest.raises(ValueError, match="device = cuda: must be cpu, as fsdp2-h.* replaces"):
        strategy.load("fsdp2-hierarchical")(model, here)


@pytest.mark.ranks
def test_a_strategy_imports_no_other_engine() -> None:
    program = (
        "import json, sys\n"
        "from baselines import registry\n"
        "without = 'torch' in sys.modules\n"
        "from baselines import strategy\n"
        "for name in ('fsdp2', 'fcdp'): strategy.load(name)\n"
        f"print(json.dumps([without, [name for name in {ENGINES} if name in sys.modules]]))\n"
    )
    torch_for_the_names, engines = json.loads(programs.printed(sys.executable, "-c", program))
    assert not torch_for_the_names
    assert engines == []


def test_zero3_gathers_what_is_frozen_and_reduces_what_is_trained() -> None:
    model = Model()
    # 28 elements outside of the blocks, gathered once, and 48 inside, gathered twice; all 76
    # reduced; half of each leaves a node, at 4 bytes.
    assert strategy.zero3_bytes(model, job_of(model)) == (28 + 2 * 48 + 76) / 2 * 4
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    assert strategy.zero3_bytes(model, job_of(model)) == (28 + 2 * 48 + 16) / 2 * 4


def test_the_loss_is_that_of_the_next_token() -> None:
    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Successor(nn.Module):
        """Is sure that each token is followed by the next number."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Output:
            assert not use_cache
            return Output(nn.functional.one_hot((input_ids + 1) % 10, 10).bfloat16() * 100)

    counting = torch.arange(8).repeat(2, 1)
    loss = strategy.causal_loss(Successor(), counting)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert strategy.causal_loss(Successor(), counting.flip(1)).item() == pytest.approx(100)
