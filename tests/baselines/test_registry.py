"""The list of strategies: what can run here, and why not."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from baselines import registry


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: entry.name)
def test_a_strategy_is_the_module_of_its_name(entry: registry.Entry) -> None:
    assert importlib.util.find_spec(entry.module) is not None
    assert entry.engine_version()


def test_names_are_given_once() -> None:
    assert len(set(registry.STRATEGY_NAMES)) == len(registry.ENTRIES)


def test_an_unknown_strategy_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="strategy = 'zero4': allowed are deepspeed-zero3, "):
        registry.find("zero4")


def test_what_needs_cuda_says_which_operator_where_there_is_none() -> None:
    entry = registry.find("deepspeed-qwz")
    assert entry.why_not(cuda=True) is None
    assert "operator quantizer" in str(entry.why_not(cuda=False))
    assert registry.find("fcdp").why_not(cuda=False) is None


def test_a_missing_header_is_named_with_its_package(tmp_path: Path) -> None:
    header = tmp_path / "libaio.h"
    entry = dataclasses.replace(
        registry.find("deepspeed-infinity"), needs_header=(header, "libaio-dev")
    )
    assert entry.why_not(cuda=True) == f"{header} is missing: sudo apt-get install libaio-dev"
    header.touch()
    assert entry.why_not(cuda=True) is None
