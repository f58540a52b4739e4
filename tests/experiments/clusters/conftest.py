"""Fixtures of tests of clusters."""

from collections.abc import Iterator

import pytest

from experiments.clusters.emulated import Network


@pytest.fixture(scope="module")
def network(privileged: None) -> Iterator[Network]:
    """Two nodes of an emulated network, without ranks."""
    with Network(2) as built:
        yield built
