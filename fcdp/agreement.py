"""Steps that all ranks take or none: one that fails must not leave others waiting."""

import zlib
from collections.abc import Callable
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist

from fcdp.exchange import any_rank, differs, flags_of, on_every_rank
from fcdp.topology import Topology

#: Bytes of an error that the other ranks show.
TEXT_BYTES = 512
_CHECKSUM_BITS = 32

_T = TypeVar("_T")


def on_all_ranks(what: str, ranks: Topology | dist.ProcessGroup, build: Callable[[], _T]) -> _T:
    """Build on all ``ranks`` or on none. Collective over them.

    Raises what ``build`` raised; where only other ranks failed, an error about ``what`` that names
    the first of them and has its words: a ``ValueError`` if that one's is, else a ``RuntimeError``.
    What ends a rank, such as ``SystemExit``, ends it once the others know, or cannot be told.
    """
    built: list[_T] = []
    error = None
    try:
        built.append(build())
    except BaseException as caught:
        error = caught
    try:
        errors = _errors(error, ranks)
    finally:
        if error is not None:
            raise error
    for rank, (kind, words) in enumerate(errors):
        if words:
            raise kind(f"{what}: rank {rank}: {words}")
    return built[0]


def _errors(
    error: BaseException | None, ranks: Topology | dist.ProcessGroup
) -> list[tuple[type[Exception], str]]:
    """List what each rank raises for the others, without words where it has no error.

    [] where no rank of a topology has one.
    """
    kind: type[Exception] = ValueError if isinstance(error, ValueError) else RuntimeError
    words = "" if error is None else words_of(error)
    if isinstance(ranks, dist.ProcessGroup):
        errors = [(kind, words)] * ranks.size()
        dist.all_gather_object(errors, (kind, words), group=ranks)
        return errors
    if not any_rank([error is not None], ranks)[0]:
        return []
    data = words.replace("\0", "?").encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.tensor([kind is ValueError, *data], dtype=torch.uint8, device="cpu")
    return [
        (ValueError if first else RuntimeError, bytes(text).rstrip(b"\0").decode(errors="ignore"))
        for first, *text in on_every_rank(mine, ranks).tolist()
    ]


def check_alike(topology: Topology, **values: object) -> None:
    """Raise ``ValueError`` on all ranks where a value is shown otherwise on one. Collective."""
    sums = (zlib.crc32(repr(value).encode()) for value in values.values())
    flags = chain.from_iterable(flags_of(each, _CHECKSUM_BITS) for each in sums)
    merged = iter(any_rank([*flags], topology))
    for name in values:
        if differs([*islice(merged, 2 * _CHECKSUM_BITS)]):
            raise ValueError(f"{name}: differs between ranks; must be alike on all")


def words_of(error: BaseException) -> str:
    """Return an error's text for other ranks, or its type where the text would say little."""
    try:
        words = (str(error) if isinstance(error, Exception) else "") or repr(error)
    except Exception:  # of a class that has no words for itself
        words = ""
    return words or type(error).__name__
