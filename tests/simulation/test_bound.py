"""The memory and bandwidth model, against the vectors and identities of papers.md 5."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulation.bound import (
    Cluster,
    Shape,
    estimate,
    forward_flops_per_token,
    free_bytes,
    grid_search,
    hfu_bound,
    required_bandwidth_bytes_per_s,
    token_capacity,
    transfer_seconds,
)

LENGTH = 2048
A100 = Cluster(gpus=8, memory_bytes=40e9, bandwidth_bytes_per_s=25e9, peak_flops=312e12)

#: Layers, width, GPUs; free GB, tokens; the bound at 200 and 100 Gbit/s (A100 40 GB, γ = 0).
VECTORS = [
    (24, 2048, 8, 37.6, 382_325, 35.7, 17.9),
    (32, 4096, 8, 27.1, 103_435, 8.98, 4.49),
    (40, 5120, 8, 14.8, 36_216, 3.10, 1.55),
    (80, 8192, 64, 23.9, 18_229, 1.52, 0.76),
    (96, 12288, 512, 34.6, 14_650, 1.21, 0.60),
    (96, 16384, 512, 30.3, 9_643, 0.79, 0.39),
]

shapes = st.builds(
    Shape,
    layers=st.integers(1, 128),
    width=st.integers(64, 16384),
    element_bytes=st.sampled_from([2, 4]),
)
clusters = st.builds(
    Cluster,
    gpus=st.integers(1, 1024),
    memory_bytes=st.floats(1e9, 2e11),
    bandwidth_bytes_per_s=st.floats(1e7, 1e12),
    peak_flops=st.floats(1e12, 2e15),
)
lengths = st.integers(1, 65536)
shares = st.floats(0, 1)


@pytest.mark.parametrize(
    ("layers", "width", "gpus", "free_gb", "tokens", "at_200", "at_100"), VECTORS
)
def test_vectors(
    layers: int,
    width: int,
    gpus: int,
    free_gb: float,
    tokens: int,
    at_200: float,
    at_100: float,
) -> None:
    shape, cluster = Shape(layers=layers, width=width), replace(A100, gpus=gpus)
    assert free_bytes(shape, cluster) / 1e9 == pytest.approx(free_gb, abs=0.05)
    assert token_capacity(shape, cluster) == pytest.approx(tokens, abs=1)
    # The table gives three figures, the last of them rounded.
    assert hfu_bound(shape, cluster, LENGTH) == pytest.approx(at_200, abs=0.05, rel=0.005)
    slower = replace(cluster, bandwidth_bytes_per_s=12.5e9)
    assert hfu_bound(shape, slower, LENGTH) == pytest.approx(at_100, abs=0.05, rel=0.01)


@given(shapes, clusters, lengths)
def test_the_bound_is_the_utilisation_of_a_step_that_only_gathers(
    shape: Shape, cluster: Cluster, length: int
) -> None:
    """E·F_fwd / (T_transfer·S_F), which it was derived from."""
    direct = (
        token_capacity(shape, cluster)
        * forward_flops_per_token(shape, length)
        / (transfer_seconds(shape, cluster) * cluster.peak_flops)
    )
    assert math.isclose(hfu_bound(shape, cluster, length), direct, rel_tol=1e-9)


@given(shapes, clusters, lengths, st.floats(0.01, 1))
def test_the_required_bandwidth_gives_the_target(
    shape: Shape, cluster: Cluster, length: int, target: float
) -> None:
    assume(free_bytes(shape, cluster) > 0)
    needed = required_bandwidth_bytes_per_s(shape, cluster, length, target)
    assume(needed > 0)
    enough = replace(cluster, bandwidth_bytes_per_s=needed)
    assert math.isclose(hfu_bound(shape, enough, length), target, rel_tol=1e-9)


@given(shapes, clusters, lengths, shares, st.floats(1, 10))
def test_more_memory_or_bandwidth_never_hurts(
    shape: Shape, cluster: Cluster, length: int, gamma: float, factor: float
) -> None:
    found = estimate(shape, cluster, length, gamma=gamma)
    assume(found is not None)
    assert found is not None
    more = (
        replace(cluster, memory_bytes=factor * cluster.memory_bytes),
        replace(cluster, bandwidth_bytes_per_s=factor * cluster.bandwidth_bytes_per_s),
    )
    for better in more:
        other = estimate(shape, better, length, gamma=gamma)
        assert other is not None
        assert other.hfu >= found.hfu * (1 - 1e-9)
        assert hfu_bound(shape, better, length) >= hfu_bound(shape, cluster, length) * (1 - 1e-9)


@given(shapes, clusters, lengths, st.floats(0.01, 1))
def test_a_steps_utilisation_stays_below_efficiency_and_bound(
    shape: Shape, cluster: Cluster, length: int, efficiency: float
) -> None:
    found = estimate(shape, cluster, length, efficiency=efficiency)
    assume(found is not None)
    assert found is not None
    assert found.hfu <= efficiency * (1 + 1e-9)
    # Backward computes three times as much for the same gather, so the step's bound is twice that
    # of the forward: (1 + 3) / (1 + 1).
    assert found.hfu <= 2 * hfu_bound(shape, cluster, length) * (1 + 1e-9)
    assert math.isclose(found.hfu / found.mfu, 4 / 3, rel_tol=1e-9)


def test_what_does_not_fit_has_no_estimate() -> None:
    shape = Shape(layers=96, width=12288)
    assert estimate(shape, A100, LENGTH) is None
    assert grid_search(shape, A100, LENGTH, steps=5).mfu is None
    with pytest.raises(ValueError, match="gpus = 8: .* need 347.9 GB per GPU, it has 40.0"):
        required_bandwidth_bytes_per_s(shape, A100, LENGTH, 0.5)


def test_the_grid_search_finds_the_best_feasible_point() -> None:
    shape = Shape(layers=24, width=2048)
    best = grid_search(shape, A100, LENGTH, steps=20, highest_efficiency=0.75)
    assert best.mfu is not None
    assert best.tokens_per_gpu_s is not None
    # Bandwidth is no limit here: keeping all activations wastes nothing on recomputation.
    assert best.mfu.efficiency == 0.75
    assert best.mfu.estimate.mfu == pytest.approx(0.75, rel=0.01)
    for gamma in (0.0, 0.5, 1.0):
        other = estimate(shape, A100, LENGTH, gamma=gamma, efficiency=0.75)
        assert other is None or other.mfu <= best.mfu.estimate.mfu + 1e-12


@pytest.mark.parametrize("target", [0.0, -0.1, 1.5])
def test_a_target_is_a_share(target: float) -> None:
    with pytest.raises(ValueError, match="target"):
        required_bandwidth_bytes_per_s(Shape(layers=1, width=64), A100, LENGTH, target)
