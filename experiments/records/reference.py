"""What the cells of one comparison are compared with, unless somebody asks for another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Subjects of cells, the first that is there, and what columns call each: ZeRO-3 as it ships, then
#: this library without its cache, then with its defaults.
REFERENCES: Mapping[str, str] = {
    "deepspeed-zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "fcdp none": "none",
    "fcdp": "FCDP",
}


def reference(subjects: Iterable[str]) -> str | None:
    """The subject that others are compared with; ``None`` where none of the usual ones is there."""
    there = set(subjects)
    return next((name for name in REFERENCES if name in there), None)
