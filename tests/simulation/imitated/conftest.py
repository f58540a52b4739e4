"""A process of its own for the imitated accelerator, which PyTorch does not forget again."""

from collections.abc import Iterator

import pytest

from tests.ranks import Pools


@pytest.fixture(scope="package")
def apart() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
