"""Every strategy that runs on CPUs trains as FSDP2 does, or as near as its codec lets it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from baselines import registry
from experiments.records.allowed import PACKED
from experiments.records.cell import FrozenDType
from fcdp.extensions import held_bytes, local_of
from tests.baselines.training import SMALL, Run, Tuning, sent
from tests.baselines.training import step as step_of
from tests.ranks import Pools

#: Relative tolerances of each step's loss.
EXACT, ROUNDED = 1e-5, 0.03
TOLERANCES = {
    **dict.fromkeys(("fcdp", "zero3", "hpz", "mics", "offload", "replicated"), EXACT),
    **dict.fromkeys(("fcdp-paper", "fcdp-sched", "fcdp-offload", "ddp"), EXACT),
    **dict.fromkeys(("fsdp2-hsdp", "fsdp2-hsdp-offload", "fsdp2-reshard", "fsdp2-offload"), EXACT),
    "fsdp2-hierarchical": EXACT,
    **dict.fromkeys(("qwz", "qgz", "zeropp"), ROUNDED),
}


def losses(strategy: str, tuning: Tuning, accumulation: int, evaluates: bool = True) -> list[float]:
    """Losses of this rank of two nodes of two; the last is of data that are not trained on."""
    trainable, batches = Run(2, 2, accumulation, "gpt2", tuning, **SMALL).made(strategy)
    held_out = torch.arange(33).view(1, 33)
    of_steps, of_held_out = [], 0.0
    for step in range(3):
        if evaluates and step == 1:
            evaluated = trainable.evaluate(held_out)
            assert not evaluated.requires_grad
            of_held_out = evaluated.item()
        of_steps.append(step_of(trainable, batches))
    return [*of_steps, of_held_out]


@pytest.fixture(scope="module")
def reference(ranks: Pools) -> dict[Any, Any]:
    """FSDP2's losses; it trains on after an evaluation as without one."""
    by_case = {}
    for tuning, count in (("full", 1), ("lora", 2)):
        by_case[tuning, count] = ranks.run(4, losses, "fsdp2", tuning, count)
        without = ranks.run(4, losses, "fsdp2", tuning, count, False)
        assert [each[:-1] for each in by_case[tuning, count]] == [each[:-1] for each in without]
        assert len({each[-1] for each in by_case[tuning, count]}) == 1, "the ranks do not agree"
    return by_case


@pytest.mark.parametrize(("tuning", "accumulation"), [("full", 1), ("lora", 2)])
@pytest.mark.parametrize("strategy", TOLERANCES)
def test_losses_are_fsdp2s(
    ranks: Pools, reference: Any, strategy: str, tuning: str, accumulation: int
) -> None:
    actual = ranks.run(4, losses, strategy, tuning, accumulation)
    for mine, expected in zip(actual, reference[tuning, accumulation], strict=True):
        assert mine == pytest.approx(expected, rel=TOLERANCES[strategy], abs=0)
        if TOLERANCES[strategy] == ROUNDED:
            assert mine != expected, "nothing was quantised"


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "on_devices"), [("fsdp2-hsdp-offload", "fsdp2-hsdp"), ("fcdp-offload", "fcdp")]
)
def test_offloaded_shards_train_bit_for_bit_the_same_and_send_the_same(
    ranks: Pools, strategy: str, on_devices: str, tuning: Tuning
) -> None:
    run = Run(2, 2, 2, "gpt2", tuning, **SMALL)
    for mine, expected in zip(
        *(ranks.run(4, sent, run, name) for name in (strategy, on_devices)), strict=True
    ):
        assert mine.losses == expected.losses
        for link in ("inter_node", "intra_node"):
            assert mine.ledger.get(link) == expected.ledger.get(link)
        assert strategy != "fcdp-offload" or mine.across


def test_all_that_need_no_cuda_and_no_vendor_are_compared() -> None:
    names = {
        entry.name
        for entry in registry.STRATEGIES
        if entry.engine != "deepspeed"
        and entry.needs_cuda is None
        and entry.numerics != "own"
        # What needs more than ranks is compared with Adam bit for bit by tests of its own.
        and not entry.extra
    }
    # Fuyou is for one device, and ranks of a pipeline share one loss; they have tests of their own.
    assert names == {*TOLERANCES, "fsdp2", "fuyou", "pipeline"}


BFLOAT16 = SMALL | {"dtype": torch.bfloat16}
#: Where FSDP2's mixed precision, or a whole model in bfloat16, casts what is frozen in any case.
CAST = ("fsdp2", "fcdp")


@pytest.mark.parametrize("strategy", [*CAST, "ddp", "replicated"])
def test_frozen_parameters_held_in_bfloat16_train_the_same(ranks: Pools, strategy: str) -> None:
    """Autocast computes norms in float32 with weights as they are: DDP's losses differ a little."""
    run = Run(2, 1, 1, "llama", "lora", **BFLOAT16)
    expected = ranks.run(2, losses_and_frozen_bytes, run, strategy)
    actual = ranks.run(2, losses_and_frozen_bytes, replace(run, frozen="bfloat16"), strategy)
    for (wanted, wide), (got, narrow) in zip(expected, actual, strict=True):
        assert got == pytest.approx(wanted, rel=0 if strategy in CAST else 0.01, abs=0)
        assert narrow == wide / 2 > 0


# FSDP2 does not unpack what one rank alone gathers, as HSDP would have it on nodes of one rank.
@pytest.mark.parametrize(
    ("strategy", "ranks_per_node", "tolerance"),
    [
        ("fcdp", 1, 0.0),
        ("fcdp-offload", 1, 0.0),
        ("ddp", 1, 0.01),
        ("fsdp2-hsdp", 2, 0.01),
        ("fsdp2-hsdp-offload", 2, 0.01),
    ],
)
@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_base_trains_the_same(
    ranks: Pools, kind: FrozenDType, strategy: str, ranks_per_node: int, tolerance: float
) -> None:
    pytest.importorskip(PACKED[kind], reason="the group quantised has it")
    run = Run(2, ranks_per_node, 1, "llama", "lora", frozen=kind, **BFLOAT16)
    expected, actual = (
        ranks.run(run.world_size, losses_and_frozen_bytes, run, name)
        for name in ("fsdp2", strategy)
    )
    for (wanted, sharded), (got, held) in zip(expected, actual, strict=True):
        assert got == pytest.approx(wanted, rel=tolerance, abs=0)
        assert (held == sharded) == (strategy in ("fcdp", "fcdp-offload"))  # others have it whole


@pytest.mark.parametrize("strategy", ["fsdp2-hierarchical", "zero3", "fcdp"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_base_crosses_in_its_packed_size(
    ranks: Pools, kind: FrozenDType, strategy: str
) -> None:
    """As often as each strategy gathers it, by the strategy's own closed form."""
    pytest.importorskip(PACKED[kind], reason="the group quantised has it")
    run = Run(2, 2, 1, "llama", "lora", frozen=kind, **BFLOAT16)
    packed = ranks.run(4, sent, run, strategy)[0]
    assert sum(packed.across.values()) == pytest.approx(packed.least, rel=0.03)  # padded adapters
    if strategy == "zero3":
        usual = ranks.run(4, sent, replace(run, frozen="bfloat16"), strategy)[0]
        assert packed.least < 0.7 * usual.least


def losses_and_frozen_bytes(run: Run, strategy: str) -> tuple[list[float], int]:
    """Losses of training on this rank, and the bytes that it holds of frozen parameters."""
    trainable, batches = run.made(strategy)
    losses = [step_of(trainable, batches) for _ in range(4)]
    frozen = [param for param in trainable.model.parameters() if not param.requires_grad]
    return losses, sum(held_bytes(local_of(param)) for param in frozen)
