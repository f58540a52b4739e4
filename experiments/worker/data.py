"""Real text that every machine has: the Python standard library's own sources, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

_CORPUS_BYTES = 4 * 2**20


def corpus() -> torch.Tensor:
    """The first 4 MiB of the standard library's modules in the order of their names, as uint8.

    Raises ``ValueError`` where Python was installed without its sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if len(text) < 2**16:
        raise ValueError(
            f"{library}: holds {len(text)} bytes of Python sources, at least {2**16} are needed "
            "to train on; install Python with its sources"
        )
    return torch.frombuffer(text[:_CORPUS_BYTES], dtype=torch.uint8)


def micro_batches(
    text: torch.Tensor, *, rank: int, seed: int, sequences: int, sequence_length: int
) -> Iterator[torch.Tensor]:
    """Endless micro-batches, int64 (sequences, sequence_length + 1); each rank draws its own."""
    generator = torch.Generator().manual_seed(seed * 100_003 + rank)
    window = sequence_length + 1
    while True:
        starts = torch.randint(len(text) - window, (sequences,), generator=generator)
        yield torch.stack([text[start : start + window] for start in starts.tolist()]).long()
