"""What a profiled step tells of the machine's rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baselines.fuyou.blocks import Profile
from baselines.fuyou.cost import Rates
from baselines.fuyou.train import Observed
from tests.baselines.fuyou.training import settings

pytestmark = pytest.mark.unit


class _Disk:
    """Has moved something before the step that is observed."""

    def __init__(self) -> None:
        self.counts = {"read": (50, 0.1), "write": (90, 0.1)}

    def moved(self, way: str) -> tuple[int, float]:
        return self.counts[way]


def _rates(read: tuple[int, float], **chosen: Any) -> Rates:
    disk: Any = _Disk()
    observed = Observed(disk, SimpleNamespace(nbytes=0, seconds=0.0), SimpleNamespace(seconds=1.0))  # type: ignore[arg-type]
    nbytes, seconds = disk.counts["read"]
    disk.counts["read"] = nbytes + read[0], seconds + read[1]
    observed.computed(2.0)
    return observed.rates(Profile(10.0, 0, {}), settings(**chosen), room=7, buffers=2)


def test_rates_are_those_of_the_step_that_is_observed() -> None:
    rates = _rates((60, 2.0))
    assert rates.read == pytest.approx(30)
    assert rates.write > 1e9
    assert rates.flops == 4 * 10 / 2
    assert not rates.duplex


def test_a_disk_with_a_limit_is_no_faster_than_that() -> None:
    """Its control group lets the first megabytes pass faster."""
    rates = _rates((60, 2.0), ssd_limit=20)
    assert (rates.read, rates.write) == (20, 20)
    assert rates.duplex
