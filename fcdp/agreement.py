"""Steps that all ranks take or none: one that fails must not leave others waiting."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fcdp.checksum import checksum
from fcdp.exchange import PLACE_BITS, any_rank, differs, flags_of, on_every_rank
from fcdp.extensions import held, names_inside
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


def check_one_value(tensors: Mapping[str, torch.Tensor], topology: Topology) -> None:
    """Raise ``ValueError`` on all ranks where a name has other values on another mesh. Collective.

    Whoever reads what is written by names would get those of one mesh. Experts may be such: each
    rank has some of its own, as plain tensors sharded over the ranks that have the same ones.
    """
    apart = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() < topology.world_size
    }
    if not any_rank([bool(apart)], topology)[0]:
        return
    mine: dict[str, Any] = {}
    for name, tensor in apart.items():
        local = tensor._local_tensor
        sums = [int(checksum(each)) for each in held(local, names_inside(local))]
        mine[name] = tensor.device_mesh.get_coordinate(), sums
    by_rank: list[Any] = [None] * topology.world_size
    dist.all_gather_object(by_rank, mine, group=topology.mesh.get_group())
    seen: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, (place, sums) in chain.from_iterable(each.items() for each in by_rank):
        if seen.setdefault((name, tuple(place)), sums) != sums:
            raise ValueError(
                f"{name}: has other values on ranks of other meshes; must be a DTensor over the "
                "mesh that divides it too, such as mesh['ep'], before fully_shard (adapters are "
                "written by fcdp.save_adapters)"
            )


def check_names(tensors: Mapping[str, torch.Tensor], topology: Topology) -> None:
    """Raise ``ValueError`` on all ranks for what could not be read again by its name. Collective.

    Ranks have other names, or other values under one name.
    """
    check_alike(topology, **{"names of parameters": [*tensors]})
    check_one_value(tensors, topology)


class PartsInStep:
    """Notices where ranks that share a part of a topology are not at the same exchange of it.

    Each part counts exchanges of its own (:attr:`fcdp.topology.Topology.exchanges`), which differ
    between parts. So every rank has flags of all parts, and sets those of its own.
    """

    def __init__(self, named: Sequence[tuple[str, Topology]], whole: Topology) -> None:
        """``named`` are the parts that units of these names have, in equal number on every rank.

        Collective where there are any.
        """
        self._failures = whole.failures
        #: By the ranks of each part: a unit that they share, and the part, on these ranks alone.
        self._parts: dict[tuple[int, ...], tuple[str, Topology | None]] = {}
        if not named:
            return
        own = [topology.mesh.mesh.tolist()[0] for _, topology in named]
        firsts = on_every_rank(torch.tensor(own, device="cpu"), whole).T.tolist()
        everyone = whole.mesh.mesh.tolist()
        for (name, topology), mine, of_ranks in zip(named, own, firsts, strict=True):
            for first in sorted({*of_ranks}):
                ranks = (rank for rank, its in zip(everyone, of_ranks, strict=True) if its == first)
                part = topology if first == mine else None
                self._parts.setdefault(tuple(ranks), (name, part))

    def flags(self) -> list[bool]:
        """Return flags for ``any_rank``, as many on every rank."""
        return [
            flag
            for _, part in self._parts.values()
            for flag in (
                flags_of(part.exchanges.place, PLACE_BITS) if part else [False] * 2 * PLACE_BITS
            )
        ]

    def check(self, merged: Sequence[bool]) -> None:
        """Raise ``RankFailed`` on all ranks where the ``merged`` flags say so of a part."""
        flags = iter(merged)
        for ranks, (name, _) in self._parts.items():
            if differs([*islice(flags, 2 * PLACE_BITS)]):
                self._failures.raise_out_of_step(f"ranks {[*ranks]}, which share {name},")


def words_of(error: BaseException) -> str:
    """Return an error's text for other ranks, or its type where the text would say little."""
    try:
        words = (str(error) if isinstance(error, Exception) else "") or repr(error)
    except Exception:  # of a class that has no words for itself
        words = ""
    return words or type(error).__name__
