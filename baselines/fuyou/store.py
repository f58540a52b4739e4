"""The state on SSD, in two generations of which a record names the one that counts.

A step may end before it is written (``end``). Then reads are of its state, each group's once it is
written; the state that its record will replace stays until then.
"""

from concurrent.futures import Future, wait
from pathlib import Path

import torch

from baselines.fuyou.layout import Group, Layout, Segment, cast
from baselines.fuyou.transfers import Disk
from baselines.generations import Generations, Region


class Store:
    """The files of one model in training."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        """Raises ``ValueError`` for a folder without room, of another model, or in use."""
        regions = {
            _key(group, segment): Region(segment.nbytes, group.trained)
            for group in layout.groups()
            for segment in group.segments
        }
        self._state = Generations(
            folder, "ssd", regions, about=layout.fingerprint, more=layout.aside_bytes
        )
        self._layout = layout
        self._disk = disk
        #: Checksums of gradients that are put aside.
        self._aside: dict[int, int] = {}
        #: Whether the folder has a complete step, which is gone on from.
        self.resumes = self._state.step is not None
        #: Steps that have ended, of which the last one may not be complete on SSD.
        self.steps_ended = self.step

    @property
    def step(self) -> int:
        """Steps whose state is complete."""
        return self._state.step or 0

    def end(self) -> None:
        """End the step: reads are of what it wrote from now on."""
        assert self.steps_ended == self.step, "the step before counts"
        self.steps_ended += 1

    def read(self, group: Group, buffer: torch.Tensor) -> None:
        """Read the last step's state, but for what is cast, into a buffer of the whole group.

        Waits until it is written. Raises what went wrong in a write.
        """
        reads = [
            self.read_segment(group, segment, group.part(buffer, segment.name))
            for segment in group.segments
            if segment.name != "compute" or not group.trained
        ]
        for read in reads:
            read.result()

    def read_segment(self, group: Group, segment: Segment, memory: torch.Tensor) -> Future[int]:
        place, expected = self._state.find(_key(group, segment), self.steps_ended)
        assert expected is not None
        return self._disk.read(self._state.file, place, memory, expected)

    def write(self, group: Group, buffer: torch.Tensor) -> None:
        """Write a group as it is after the step that is not complete yet.

        Raises the error of an earlier write: nothing is written after one.
        """
        last = self._state.step
        step = 0 if last is None else last + 1
        places = [self._state.room(_key(group, segment), step) for segment in group.segments]
        with self._state.failing():
            under_way = [
                self._disk.write(self._state.file, place, group.part(buffer, segment.name))
                for place, segment in zip(places, group.segments, strict=True)
            ]
            wait(under_way)  # all of them, that the buffer is free even if one fails
            checksums = [write.result() for write in under_way]
        for segment, checksum in zip(group.segments, checksums, strict=True):
            self._state.note(_key(group, segment), checksum)

    def put_aside(self, group: Group, gradient: torch.Tensor) -> None:
        """Keep a gradient for later in the same step."""
        write = self._disk.write(self._state.file, self._place_aside(group), gradient)
        self._aside[group.index] = write.result()

    def take_aside(self, group: Group, memory: torch.Tensor) -> Future[int] | None:
        """Begin to read what was put aside, once; ``None`` if nothing was."""
        if group.index not in self._aside:
            return None
        expected = self._aside.pop(group.index)
        return self._disk.read(self._state.file, self._place_aside(group), memory, expected)

    def commit(self, step: int) -> None:
        """Commit what was written since the last record: all of it, or nothing."""
        self._state.commit(step)
        self.steps_ended = max(self.steps_ended, step)

    def put_in(self, group: Group, buffer: torch.Tensor) -> None:
        """Write a group's values in the model, by way of a buffer; its moments are zero."""
        buffer[: group.nbytes].zero_()
        dtype = torch.float32 if group.trained else self._layout.dtype
        views = group.views(group.part(buffer, group.segments[0].name), dtype)
        for view, param in zip(views, group.params, strict=True):
            view.copy_(param.detach())
        if group.trained:
            cast(group, buffer)
        self.write(group, buffer)

    def take_out(
        self, group: Group, buffer: torch.Tensor
    ) -> list[tuple[str, torch.Tensor, list[torch.Tensor]]]:
        """Each parameter's name, values and moments, by way of a buffer; frozen ones have none."""
        self.read(group, buffer)
        if not group.trained:
            frozen = group.views(group.part(buffer, "compute"), self._layout.dtype)
            return [(n, v.clone(), []) for n, v in zip(group.names, frozen, strict=True)]
        return [
            (name, master.clone(), [first.clone(), second.clone()])
            for name, master, first, second in zip(group.names, *group.states(buffer), strict=True)
        ]

    def close(self) -> None:
        self._state.close()

    def _place_aside(self, group: Group) -> int:
        return self._state.end + self._layout.gradients[group.index]


def _key(group: Group, segment: Segment) -> str:
    return f"{group.index} {segment.name}"
