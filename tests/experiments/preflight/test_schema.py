"""The line through the samples of a link, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.preflight import probe
from experiments.preflight.schema import Link, Preflight
from tests.experiments.preflight.made_up import preflight

SIZES = [4**power for power in range(5, 14)]


def fitted(samples: list[tuple[int, float]]) -> Link:
    return Link.model_validate(probe.line(2, samples))


@given(
    latency=st.floats(0, 1e-2),
    bytes_per_s=st.floats(1e5, 1e11),
    sizes=st.lists(st.sampled_from(SIZES), min_size=2, unique=True),
)
def test_a_line_is_found_again(latency: float, bytes_per_s: float, sizes: list[int]) -> None:
    link = fitted([(size, latency + size / bytes_per_s) for size in sizes])
    for sample in link.samples:
        found = link.latency_s + sample.bytes / link.bytes_per_s
        assert found == pytest.approx(sample.seconds, rel=1e-3)


def test_a_burst_that_passes_at_full_speed_does_not_raise_the_bandwidth() -> None:
    bucket, rate = 36_000, 1.25e6
    samples = [(size, 1e-4 + max(0, size - bucket) / rate) for size in SIZES[:6]]
    assert fitted(samples).bytes_per_s == pytest.approx(rate, rel=0.02)


def test_noise_gives_no_negative_bandwidth() -> None:
    link = fitted([(1024, 0.2), (4096, 0.1)])
    assert link.bytes_per_s == pytest.approx(40960)
    assert link.latency_s >= 0


def test_the_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight().model_dump_json())
    assert Preflight.read(file) == preflight()
    file.write_text(preflight().model_dump_json().replace('"nodes"', '"knots"'))
    with pytest.raises(ValueError, match="preflight.json: not a preflight of this version"):
        Preflight.read(file)


@pytest.mark.parametrize(
    ("part", "change", "problem"),
    [
        ("compute", {"matmul_flops_per_s": {"float32": 1e12}}, "bfloat16 is missing"),
        (
            "compute",
            {"memory_bytes": None, "matmul_flops_per_s": {"bfloat16": 1e12}},
            "float32 is missing",
        ),
        ("host", {"to_device_bytes_per_s": None}, "host.to_device_bytes_per_s: is missing"),
        ("host", {"from_device_bytes_per_s": None}, "host.from_device_bytes_per_s: is missing"),
        ("links", {"inter_node_all_gather": 1}, "links.inter_node_all_gather: Input should be"),
    ],
)
def test_what_plans_need_must_be_there(
    part: str, change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    content = json.loads(preflight().model_dump_json())
    content[part] |= change
    file = tmp_path / "preflight.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a preflight of this version") as error:
        Preflight.read(file)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
