"""Refusals of the model of memory and bandwidth; tests/analysis/load has its values."""

import pytest

from simulation.bound import Point

#: A model on eight A100s of 40 GB.
POINT = Point(
    model="made up",
    named_parameters=1e9,
    layers=24,
    width=2048,
    gpus=8,
    memory_bytes=40e9,
    bandwidth_bits_per_s=200e9,
    peak_flops=312e12,
    sequence_length=2048,
)


def test_what_does_not_fit_has_no_estimate_and_a_target_is_a_share() -> None:
    one = POINT.model_copy(update={"layers": 96, "width": 12288})
    assert one.estimate() is None
    assert not [*one.grid(steps=5)]
    with pytest.raises(ValueError, match="gpus = 8: .* need 347.9 GB per GPU, it has 40.0"):
        one.required_bandwidth_bytes_per_s(0.5)
    for target in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match="target"):
            POINT.required_bandwidth_bytes_per_s(target)
