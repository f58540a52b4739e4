"""Runs on ranks of the accelerator the functions that tests run on processes with CPUs."""

from collections.abc import Callable
from typing import Any

from tests.ranks import Pools


class OnStreams(Pools):
    """Ranks are threads of one process, on streams; what nothing orders is a failure.

    ``seed`` draws what the host finds of events, and is the first of the schedules.
    """

    def __init__(
        self, apart: Pools, *, samples: bool = False, schedules: int = 1, seed: int = 0
    ) -> None:
        self._apart = apart
        self.samples = samples
        self._schedules = schedules
        self._seed = seed

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 400
    ) -> list[Any]:
        arguments = (function, world_size, args, self._schedules, self._seed)
        (results,) = self._apart.run(1, on_streams, *arguments, timeout_s=timeout_s)
        return results

    def close(self) -> None: ...


def on_streams(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], schedules: int, seed: int
) -> list[Any]:
    from tests.fcdp import accelerator

    results, tape = accelerator.run(function, world_size, *args, seed=seed)
    wrong = accelerator.check(tape, range(seed, seed + schedules))
    assert wrong is None, wrong
    return results
