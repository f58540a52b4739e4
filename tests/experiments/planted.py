"""Secrets as people have them in their environment."""

import re
from collections.abc import Mapping

import pytest

from tests.experiments.golden import tables

#: Values by variable; "marker" and what follows it is the part that no rank may see.
PLANTED: Mapping[str, str] = tables(__file__)


def plant(patch: pytest.MonkeyPatch) -> None:
    """Put them into the environment, with one more secret that is to pass."""
    variables = {**PLANTED, "FCDP_PASS": "MY_TOKEN", "MY_TOKEN": "a gated model's"}
    for name, value in variables.items():
        patch.setenv(name, value)


def markers(text: str) -> list[str]:
    return re.findall(r"marker\d+", text)
