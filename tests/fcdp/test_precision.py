"""Gather and reduce dtypes of their own, and loss scaling: the same as with FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fcdp
from tests.fcdp.training import (
    Settings,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    shard_with_fcdp,
    shard_with_fsdp2,
    topology_of,
    train,
)
from tests.ranks import Pools

DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
#: With four summands, whose order differs from that of gloo's ring. Of losses from 9 to 4.
SUMMED_OTHERWISE = 0.03


@pytest.mark.parametrize(("param_dtype", "reduce_dtype"), DTYPES)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2)])
def test_dtypes_match_fsdp2(
    ranks: Pools,
    nodes: int,
    ranks_per_node: int,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> None:
    settings = Settings(nodes, ranks_per_node, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    expected = ranks.run(settings.world_size, train, settings, "fsdp2")
    actual = ranks.run(settings.world_size, train, settings, "fcdp")
    for wanted, got in zip(expected, actual, strict=True):
        if settings.world_size == 2:
            assert got.losses == wanted.losses
            for name, param in wanted.params.items():
                assert torch.equal(got.params[name], param), name
        else:
            assert got.losses == pytest.approx(wanted.losses, rel=SUMMED_OTHERWISE)


def test_reductions_travel_in_the_reduce_dtype(ranks: Pools) -> None:
    sent = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = Settings(2, 1, param_dtype=torch.bfloat16, reduce_dtype=dtype)
        sent[dtype] = ranks.run(2, train, settings, "fcdp")[0].ledger["inter_node"]
    assert sent[torch.float32]["reduce"] == 2 * sent[torch.bfloat16]["reduce"]
    assert sent[torch.float32]["forward"] == sent[torch.bfloat16]["forward"]


@dataclass(frozen=True)
class Scaled:
    losses: list[float]
    scales: list[float]
    finite: bool


def train_with_a_scaler(settings: Settings, engine: str) -> Scaled:
    """fp16 under a gradient scaler that begins too high, so that the first steps overflow."""
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    shard = {"fsdp2": shard_with_fsdp2, "fcdp": shard_with_fcdp}[engine]
    model = shard(make_model(settings), topology, settings)
    optimizer = make_optimizer(model, settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
    data = batches(settings, topology.rank)
    losses, scales = [], []
    for _ in range(settings.steps):
        loss = loss_of(model, next(data))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    finite = all(bool(param.to_local().isfinite().all()) for param in model.parameters())
    return Scaled(losses, scales, finite)


FP16 = Settings(steps=10, param_dtype=torch.float16)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2)])
def test_a_gradient_scaler_skips_the_steps_that_it_skips_with_fsdp2(
    ranks: Pools, nodes: int, ranks_per_node: int
) -> None:
    settings = replace(FP16, nodes=nodes, ranks_per_node=ranks_per_node)
    expected = ranks.run(settings.world_size, train_with_a_scaler, settings, "fsdp2")
    actual = ranks.run(settings.world_size, train_with_a_scaler, settings, "fcdp")
    assert min(expected[0].scales) < 2.0**18, "nothing overflowed"
    assert len(set(expected[0].scales[-4:])) > 1, "nothing was stepped"
    for wanted, got in zip(expected, actual, strict=True):
        if settings.world_size == 2:
            assert got == wanted
        else:
            assert got.finite
            assert got.scales == wanted.scales
            assert got.losses == pytest.approx(wanted.losses, rel=SUMMED_OTHERWISE)


@pytest.mark.parametrize("error_feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2)])
def test_a_gradient_scaler_sees_overflows_through_codecs(
    ranks: Pools, nodes: int, ranks_per_node: int, error_feedback: bool
) -> None:
    codec = fcdp.BlockInt8(32)
    settings = replace(
        FP16,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gather_codec=codec,
        reduce_codec=codec,
        error_feedback=error_feedback,
    )
    results = ranks.run(settings.world_size, train_with_a_scaler, settings, "fcdp")
    for result in results:
        assert result.finite
        assert result.scales == results[0].scales
        assert min(result.scales) < 2.0**18, "no overflow was seen"
        assert result.losses[-1] < result.losses[0], "every step was skipped"
        # The scale has found its place: it would fall for ever if an overflow stayed.
        assert min(result.scales) >= 2.0**12
