"""A place for the traces of steps."""

from pathlib import Path

import pytest


@pytest.fixture
def kept(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of ``--keep``, if given: a trace that is written there outlives the test."""
    return Path(pytestconfig.getoption("--keep") or tmp_path).absolute()
