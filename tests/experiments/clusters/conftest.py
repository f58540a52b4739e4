from __future__ import annotations

import pytest

from experiments.clusters.privileges import missing_capabilities


@pytest.fixture(scope="session")
def privileged() -> None:
    """Skip where network namespaces cannot be made directly."""
    if missing := missing_capabilities():
        pytest.skip(f"needs {' and '.join(missing)}: run as root")
