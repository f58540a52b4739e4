"""The memory and bandwidth model, against identities; claims hold it against papers.md 5.3."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulation.bound import Point


def point(layers: int = 24, width: int = 2048) -> Point:
    """A model on eight A100s of 40 GB."""
    return Point(
        model="made up",
        named_parameters=1e9,
        layers=layers,
        width=width,
        gpus=8,
        memory_bytes=40e9,
        bandwidth_bits_per_s=200e9,
        peak_flops=312e12,
        sequence_length=2048,
    )


points = st.builds(
    Point,
    model=st.just("drawn"),
    named_parameters=st.just(1e9),
    layers=st.integers(1, 128),
    width=st.integers(64, 16384),
    gpus=st.integers(1, 1024),
    memory_bytes=st.floats(1e9, 2e11),
    bandwidth_bits_per_s=st.floats(8e7, 8e12),
    peak_flops=st.floats(1e12, 2e15),
    sequence_length=st.integers(1, 65536),
)
shares = st.floats(0, 1)


@given(points)
def test_the_bound_is_the_utilisation_of_a_step_that_only_gathers(one: Point) -> None:
    """It was derived from E·F_fwd / (T_transfer·S_F)."""
    direct = one.tokens() * one.forward_flops / (one.transfer_seconds * one.peak_flops)
    assert math.isclose(one.hfu_bound, direct, rel_tol=1e-9)


@given(points, st.floats(0.01, 1))
def test_the_required_bandwidth_gives_the_target(one: Point, target: float) -> None:
    assume(one.free_bytes() > 0)
    needed = one.required_bandwidth_bytes_per_s(target)
    assume(needed > 0)
    enough = one.model_copy(update={"bandwidth_bits_per_s": 8 * needed})
    assert math.isclose(enough.hfu_bound, target, rel_tol=1e-9)


@given(points, shares, st.floats(1, 10))
def test_more_memory_or_bandwidth_never_hurts(one: Point, gamma: float, factor: float) -> None:
    estimate = one.estimate(gamma)
    assume(estimate is not None)
    for name in ("memory_bytes", "bandwidth_bits_per_s"):
        better = one.model_copy(update={name: factor * getattr(one, name)})
        other = better.estimate(gamma)
        assert other.hfu >= estimate.hfu * (1 - 1e-9)
        assert better.hfu_bound >= one.hfu_bound * (1 - 1e-9)


@given(points, st.floats(0.01, 1))
def test_a_steps_utilisation_stays_below_efficiency_and_bound(
    one: Point, efficiency: float
) -> None:
    estimate = one.estimate(efficiency=efficiency)
    assume(estimate is not None)
    assert estimate.hfu <= efficiency * (1 + 1e-9)
    # Backward computes three times as much for the same gather, so the step's bound is twice that
    # of the forward: (1 + 3) / (1 + 1).
    assert estimate.hfu <= 2 * one.hfu_bound * (1 + 1e-9)
    assert math.isclose(estimate.hfu / estimate.mfu, 4 / 3, rel_tol=1e-9)


def test_what_does_not_fit_has_no_estimate_and_a_target_is_a_share() -> None:
    one = point(96, 12288)
    assert one.estimate() is None
    assert not [*one.grid(steps=5)]
    with pytest.raises(ValueError, match="gpus = 8: .* need 347.9 GB per GPU, it has 40.0"):
        one.required_bandwidth_bytes_per_s(0.5)
    for target in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match="target"):
            point().required_bandwidth_bytes_per_s(target)
