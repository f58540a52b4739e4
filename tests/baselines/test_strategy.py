"""Strategies by name: what they import and refuse; and their loss."""

import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from baselines import registry, strategy
from baselines.registry import STRATEGY_NAMES
from baselines.settings import CacheSettings, EncodedSettings, Settings
from tests import programs
from tests.baselines.cyclic.training import Tied
from tests.baselines.jobs import alone, job

#: A vendor's engine may be missing, or slow to import: only its own strategy may need it.
ENGINES = ("deepspeed", "transformers", "peft")


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
    model = Tied()
    with pytest.raises(ValueError, match=reason):
        strategy.load(name)(model, job(alone(), model.blocks, settings=chosen))


def test_what_takes_the_place_of_gloos_collectives_is_refused_on_an_accelerator() -> None:
    model = Tied()
    here = job(alone(device="cuda"), model.blocks)
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


def test_the_loss_is_that_of_the_next_token() -> None:
    class Successor(nn.Module):
        """Is sure that each token is followed by the next number."""

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            assert not use_cache
            logits = nn.functional.one_hot((input_ids + 1) % 10, 10).bfloat16() * 100
            return SimpleNamespace(logits=logits)

    counting = torch.arange(8).repeat(2, 1)
    loss = strategy.causal_loss(Successor(), counting)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert strategy.causal_loss(Successor(), counting.flip(1)).item() == pytest.approx(100)
