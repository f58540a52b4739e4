"""Steps that all ranks take or none: one that fails must not leave others waiting."""

import zlib
from collections.abc import Callable
from typing import TypeVar

import torch

from fcdp.exchange import any_rank, on_every_rank
from fcdp.topology import Topology

#: Bytes of an error that the other ranks show.
TEXT_BYTES = 512

_T = TypeVar("_T")


def on_all_ranks(what: str, topology: Topology, build: Callable[[], _T]) -> _T:
    """Build on all ranks or on none. Collective.

    Raises what ``build`` raised; where only other ranks failed, a ``RuntimeError`` about ``what``
    that names the first of them and its error. What ends a rank, such as ``SystemExit``, ends it
    once the others know.
    """
    built: list[_T] = []
    error = None
    try:
        built.append(build())
    except BaseException as caught:
        error = caught
    (failed,) = any_rank([error is not None], topology)
    if not failed:
        return built[0]
    text = "" if error is None else words_of(error)
    data = text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.tensor([*data], dtype=torch.uint8, device="cpu")
    texts = [bytes(each).rstrip(b"\0") for each in on_every_rank(mine, topology).tolist()]
    if error is not None:
        raise error
    rank, text = next(
        (rank, each.decode(errors="ignore")) for rank, each in enumerate(texts) if each
    )
    raise RuntimeError(f"{what}: rank {rank}: {text}")


def check_alike(topology: Topology, **values: object) -> None:
    """Raise ``ValueError`` on all ranks where a value is shown otherwise on one. Collective."""
    shown = (repr(value).encode() for value in values.values())
    sums = torch.tensor([*map(zlib.crc32, shown)], device="cpu")
    first, *others = on_every_rank(sums, topology).tolist()
    for rank, sums_there in enumerate(others, start=1):
        for name, there, expected in zip(values, sums_there, first, strict=True):
            if there != expected:
                raise ValueError(f"{name}: differs between ranks 0 and {rank}; must be alike")


def words_of(error: BaseException) -> str:
    """What other ranks are told of an error; its type where its text alone would say little."""
    try:
        return (str(error) if isinstance(error, Exception) else "") or repr(error)
    except Exception:  # of a class that has no words for itself
        return type(error).__name__
