"""Policies by name: what matrix files may say."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import fcdp
from fcdp.cache.named import parse

TEMPORARY = Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("none", fcdp.NoCache()),
        ("device", fcdp.DeviceCache()),
        ("host", fcdp.HostCache()),
        ("disk", fcdp.DiskCache(TEMPORARY)),
        ("threshold(0.8)", fcdp.Threshold(0.8)),
        ("budget(device=1.5 KiB, host=2GiB)", fcdp.Budget(device=1536, host=2**31)),
        ("budget(disk=7)", fcdp.Budget(disk=7, directory=TEMPORARY)),
        ("auto", fcdp.Auto()),
    ],
)
def test_names_stand_for_policies(text: str, policy: fcdp.CachePolicy) -> None:
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ram", "allowed are none, device, host"),
        ("host(1)", "takes no argument"),
        ("threshold", "takes one number"),
        ("threshold(2)", "tau = 2.0"),
        ("budget(gpu=1)", "device, host and disk"),
        ("budget(host=much)", "'much' is not a size"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="policy = ") as error:
        parse(text)
    assert words in str(error.value)
