"""This rank's own shard as the other nodes hold it: what differences lead from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fcdp.cache.entry import Entry
from fcdp.delta import message
from fcdp.topology import Topology
from fcdp.unit import Unit


class Sent:
    """The last version of one unit's own shard that every node has been given to keep.

    Takes the shard's size in host memory, from the first gather on. The thread that trains alone
    reads and writes it: all of this is on the CPU.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._memory: torch.Tensor | None = None
        self._version = 0

    @property
    def usable(self) -> bool:
        """Whether this rank can tell a difference, and apply those of the others."""
        entry = self._entry
        held = entry.tier is not None and entry.held == entry.offered
        return held and entry.offered > 0 and self._version == entry.offered

    def write(self, own: torch.Tensor) -> torch.Tensor:
        """The message (uint8) that leads from what the other nodes hold to ``own`` (s)."""
        assert self.usable, self._entry.unit.name
        assert self._memory is not None
        self._version = 0  # whoever interrupts the exchange leaves nodes with different versions
        return message.write(own, self._memory, self._entry.offered)

    def read(self, arrived: torch.Tensor, row: torch.Tensor) -> None:
        """Apply the message of another node to its ``row`` (s) as it was.

        Raises ``RuntimeError`` for one that does not fit it.
        """
        try:
            message.read(arrived, row, self._entry.offered)
        except ValueError as error:
            raise RuntimeError(
                f"{self._entry.unit.name}: {error}; call fcdp.invalidate(model) on every rank, and "
                "all units will be gathered anew"
            ) from error

    def keep(self, own: torch.Tensor) -> None:
        """Note that the other nodes keep ``own`` (s)."""
        if self._memory is None or self._memory.shape != own.shape:
            self._memory = torch.empty_like(own)
        self._memory.copy_(own)
        self._version = self._entry.offered


def check_differences(units: Sequence[Unit], topology: Topology) -> None:
    """Raises ``ValueError`` for units of which no difference can be told."""
    if topology.mesh.device_type != "cpu":
        raise ValueError(
            f"gather_codec = fcdp.Delta() on {topology.mesh.device_type}: only the CPU is allowed, "
            "as sizes that the host does not know yet cannot be exchanged between accelerators; "
            "leave it out, or use fcdp.BlockInt8(), which rounds"
        )
    for unit in units:
        if len(unit.gather_dtypes) > 1 or not unit.gather_dtypes <= message.DTYPES:
            dtypes = ", ".join(sorted(map(str, unit.gather_dtypes)))
            raise ValueError(
                f"gather_codec = fcdp.Delta(): {unit.name} gathers parameters of {dtypes}; each "
                "unit must gather one floating dtype of 2, 4 or 8 bytes, for example with "
                "MixedPrecisionPolicy(param_dtype=...)"
            )
