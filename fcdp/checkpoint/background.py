"""A process group, a thread and agreement, which all saves and loads of a topology share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fcdp.topology import Topology

_T = TypeVar("_T")


class Background:
    """A group of their own, because training goes on in the others, and an order for its use.

    What is done in it is done in one order on every rank, because that group is one.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fcdp-save")

    def settle(self) -> None:
        """Wait for the saves under way, whose futures tell how they went."""
        self.thread.submit(lambda: None).result()

    def agree(self, build: Callable[[], _T]) -> _T:
        """Build on all ranks or on none. Collective.

        Raises what ``build`` raised, and where it went well the same of the first rank where it
        did not: ``ValueError`` as such, anything else as ``RuntimeError``.
        """
        built: list[_T] = []
        error: Exception | None = None
        try:
            built.append(build())
        except Exception as caught:
            error = caught
        reports: list[tuple[bool, str] | None] = [None] * self.group.size()
        mine = None if error is None else (isinstance(error, ValueError), str(error))
        dist.all_gather_object(reports, mine, group=self.group)
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                kind = ValueError if report[0] else RuntimeError
                raise kind(f"rank {rank}: {report[1]}")
        return built[0]


_backgrounds: WeakKeyDictionary[Topology, Background] = WeakKeyDictionary()


def background_of(topology: Topology) -> Background:
    if topology not in _backgrounds:
        _backgrounds[topology] = Background()
    return _backgrounds[topology]
