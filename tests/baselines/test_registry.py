"""The list of strategies: what can run here, why not, and the schedule of each."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from pydantic import ValidationError

from baselines import pins, registry
from baselines.description import Strategy
from baselines.pins import Pin
from baselines.registry import STRATEGIES, schedule_of
from baselines.schedule import FCDP
from baselines.settings import CacheSettings


def test_names_are_given_once_and_others_are_refused_with_what_there_is() -> None:
    assert len(set(registry.STRATEGY_NAMES)) == len(registry.STRATEGIES)
    with pytest.raises(ValueError, match="strategy = 'zero4': allowed are deepspeed-zero3, "):
        registry.find("zero4")


def test_what_needs_cuda_or_has_one_pin_says_so() -> None:
    entry = registry.find("deepspeed-qwz")
    assert entry.why_not(cuda=True) is None
    assert "operator quantizer" in str(entry.why_not(cuda=False))
    assert registry.find("fcdp").why_not(cuda=False) is None
    entry = registry.find("fsdp2-hierarchical")
    assert entry.why_not(cuda=False) is None
    assert "over NCCL fsdp2 has NCCL's own" in str(entry.why_not(cuda=True))
    reason = registry.find("fsdp2").why_not(cuda=True, deepspeed="paper")
    assert reason == "fsdp2 does not use DeepSpeed, so it has one pin only"


@pytest.mark.parametrize("pin", pins.PINS)
def test_a_pin_that_is_not_installed_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, pin: Pin
) -> None:
    entry = registry.find("deepspeed-hpz")
    monkeypatch.setattr(pins, "version", {"current": None, "paper": None}.get)
    command = {"current": "make setup", "paper": "make baselines"}[pin]
    expected = f"DeepSpeed ({pin}) is not installed: {command}"
    assert entry.why_not(cuda=True, deepspeed=pin) == expected


def test_what_a_pin_cannot_do_names_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "version", {"current": "0.19.6", "paper": "0.16.2"}.get)
    for name in ("deepspeed-qwz", "deepspeed-qgz", "deepspeed-zeropp", "deepspeed-mics"):
        for pin in pins.PINS:
            reason = registry.find(name).why_not(cuda=False, deepspeed=pin)
            assert str(reason).startswith(f"DeepSpeed {pins.version(pin)} ")


def test_a_missing_header_is_named_with_its_package(tmp_path: Path) -> None:
    header = tmp_path / "libaio.h"
    entry = dataclasses.replace(
        registry.find("deepspeed-infinity"), needs_header=(header, "libaio-dev")
    )
    assert entry.why_not(cuda=True) == f"{header} is missing: sudo apt-get install libaio-dev"
    header.touch()
    assert entry.why_not(cuda=True) is None


def test_a_strategy_takes_of_what_is_given_what_it_has() -> None:
    given = {"policy": "disk", "gather_codec": "int8", "deepspeed": "paper"}
    assert dict(registry.find("fsdp2").chosen(given)) == {"forwards": "gathered"}
    assert dict(registry.find("deepspeed-hpz").chosen(given)) == {"deepspeed": "paper"}
    assert registry.find("fcdp").chosen(given) == CacheSettings(policy="disk", gather_codec="int8")
    with pytest.raises(ValidationError, match="needs a reduce_codec"):
        registry.find("zero3").chosen({"error_feedback": True})


@pytest.mark.parametrize(
    ("name", "given", "own"),
    [
        ("zeropp", {"gather_codec": "delta"}, "int8"),
        ("zeropp", {"reduce_codec": "int8"}, "int4"),
        ("qwz", {"gather_codec": "int8"}, "int8"),
        ("qgz", {"reduce_codec": "int8(128)"}, "int4"),
    ],
)
def test_a_codec_beside_the_strategys_own_is_refused(
    name: str, given: dict[str, str], own: str
) -> None:
    ((field, value),) = given.items()
    with pytest.raises(ValidationError, match=f"{own}, in any case") as caught:
        registry.find(name).chosen(given)
    (error,) = caught.value.errors()
    assert (error["loc"], error["input"]) == ((field,), value)
    assert error["msg"].startswith("Value error, allowed is none")


def test_a_codec_that_the_strategy_does_not_fix_is_taken() -> None:
    assert dict(registry.find("qwz").chosen({"reduce_codec": "int4"}))["reduce_codec"] == "int4"
    assert dict(registry.find("hpz").chosen({"gather_codec": "int8"}))["gather_codec"] == "int8"
    assert dict(registry.find("zeropp").chosen({"gather_codec": "none"}))["gather_codec"] == "none"


SCHEDULED = [strategy for strategy in STRATEGIES if strategy.schedule is not None]


@pytest.mark.parametrize("strategy", SCHEDULED, ids=lambda strategy: str(strategy.name))
def test_what_quantises_says_so(strategy: Strategy) -> None:
    schedule = schedule_of(strategy.name)
    quantises = bool(schedule.gather_codec or schedule.reduce_codec)
    assert quantises == (strategy.numerics == "bounded")


def test_a_strategy_without_a_schedule_is_not_simulated() -> None:
    added = replace(registry.find("fcdp"), name="added", schedule=None)
    with mock.patch.object(registry, "STRATEGIES", (*STRATEGIES, added)):
        assert "added" not in registry.simulated()
        with pytest.raises(ValueError, match="strategy = 'added': is not simulated yet"):
            schedule_of("added")


def test_where_entries_lie() -> None:
    """A policy that the strategy fixes goes before the cell's."""
    assert FCDP.keeps_in("disk") == "disk"
    assert replace(FCDP, policy="device").keeps_in("disk") == "device"
    assert replace(FCDP, cache=None).keeps_in("disk") is None
