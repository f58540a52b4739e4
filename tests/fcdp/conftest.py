"""A process of its own for the accelerator, which PyTorch does not forget again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks import Pools


class Here:
    """In place of a pool: this process, which was forked for its tests and ends with them."""

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        assert world_size == 1, "ranks of the accelerator are threads"
        return [function(*args)]


@pytest.fixture(scope="package")
def apart() -> Iterator[Pools | Here]:
    if "FCDP_TESTS_ARE_APART" in os.environ:  # scripts/mutants
        yield Here()
        return
    pools = Pools()
    yield pools
    pools.close()
