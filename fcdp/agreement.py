"""Steps that all ranks take or none: one that fails must not leave others waiting."""

import zlib
from collections.abc import Callable
from itertools import chain, islice
from typing import TypeVar

import torch

from fcdp.exchange import any_rank, differs, flags_of, on_every_rank
from fcdp.topology import Topology

#: Bytes of an error that the other ranks show.
TEXT_BYTES = 512
_CHECKSUM_BITS = 32

_T = TypeVar("_T")


def on_all_ranks(what: str, topology: Topology, build: Callable[[], _T]) -> _T:
    """Build on all ranks or on none. Collective.

    Raises what ``build`` raised; where only other ranks failed, a ``RuntimeError`` about ``what``
    that names the first of them and its error. What ends a rank, such as ``SystemExit``, ends it
    once the others know, or cannot be told.
    """
    built: list[_T] = []
    error = None
    try:
        built.append(build())
    except BaseException as caught:
        error = caught
    try:
        texts = _texts(error, topology)
    finally:
        if error is not None:
            raise error
    for rank, text in enumerate(texts):
        if text:
            raise RuntimeError(f"{what}: rank {rank}: {text}")
    return built[0]


def _texts(error: BaseException | None, topology: Topology) -> list[str]:
    """List what each rank's error says, of a rank without one nothing; [] where no rank has one."""
    if not any_rank([error is not None], topology)[0]:
        return []
    text = "" if error is None else words_of(error).replace("\0", "?")
    data = text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.tensor([*data], dtype=torch.uint8, device="cpu")
    texts = on_every_rank(mine, topology).tolist()
    return [bytes(each).rstrip(b"\0").decode(errors="ignore") for each in texts]


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
