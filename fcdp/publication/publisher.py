"""Writing what has changed since the last publication, each rank of its own shards."""

import json
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fcdp.agreement import check_one_value, on_all_ranks
from fcdp.checkpoint.saving import split
from fcdp.checksum import checksum
from fcdp.delta import message
from fcdp.delta.difference import prepare
from fcdp.delta.packing import places
from fcdp.engine import Engine, engine_of
from fcdp.exchange import any_rank, on_every_rank
from fcdp.extensions import coded, is_packed, opened
from fcdp.publication.files import (
    COMPRESSED,
    File,
    Kind,
    Part,
    Place,
    flattened,
    library,
    pack,
    words,
)

#: The model's attribute: a publisher refers to its model, and must not outlive it elsewhere.
_ATTRIBUTE = "_fcdp_publisher"


@dataclass(frozen=True)
class Publication:
    """Files that all ranks together have written.

    Attributes:
        version: Its number, from 1 on.
        words: Parameters and buffers that are followed.
        changed: How many of them differ from the version before.
        delta_bytes: Files that lead here from the version before, headers included; none of the
            first.
        anchor_bytes: Files that hold full values, if any.

    Example:
        >>> first, second = fcdp.publish(model, directory), fcdp.publish(model, directory)
        >>> first.changed == first.words, second.changed
        (True, 0)
    """

    version: int
    words: int
    changed: int
    delta_bytes: int
    anchor_bytes: int

    @property
    def bits_per_parameter(self) -> float:
        """Bits of the difference per word that is followed.

        Returns:
            Headers included; 0 for the first version.
        """
        return 8 * self.delta_bytes / max(1, self.words)


def publish(
    model: nn.Module,
    place: str | os.PathLike[str],
    *,
    anchor_every: int = 10,
    compressed: bool = False,
    trainable_only: bool = False,
    dtype: torch.dtype | None = None,
) -> Publication:
    """Write what has changed since the last publication, for those who generate with the model.

    Collective: every rank calls it, between steps, and writes its own shards; nothing is gathered.
    Readers follow with ``fcdp.Subscriber``. A version counts once all ranks' files are there, each
    of which is there whole or not at all; a run that is killed and started again goes on behind
    what it finds, by an anchor. Nothing is removed: what is older than the last anchor may be, once
    no reader is behind it.

    Files are as TRL's delta weight sync has them (its pull request 5417): in
    ``deltas/step_000011-00001-of-00004.safetensors`` for each changed parameter ``NAME.indices``
    (int32, in the whole flat parameter) and ``NAME.values``, which are vLLM's sparse patches, and
    in the header ``sparse``, ``model_version``, ``sparsity`` and ``changed_params``; ``anchors/``
    has full values. Other than there, a version has a file per rank, an anchor's tensors are the
    rank's rows (``parts`` in the header says which), a difference leads to each anchor but the
    first too, frozen parameters are in ``frozen/`` once and no anchor repeats them, and the header
    has a checksum of the file and, as ``run``, an id of the run that has published it.

    Each rank keeps what it published last in host memory: of the followed parameters its shards.
    It does so for one place and one set of options: with others the next publication starts anew.

    Args:
        model: A cached model.
        place: A folder that all ranks and readers see, or whatever fsspec names (``s3://…``).
        anchor_every: Versions from one anchor to the next; those who join read the last.
        compressed: Differences of all parameters in one coded tensor instead, for
            ``fcdp.Subscriber`` alone: a fourth to a twelfth of the bytes, near their entropy.
        trainable_only: Leave frozen parameters out, as readers of adapters have them.
        dtype: What parameters and floating-point buffers are rounded to; ``None``: what each is
            gathered in, and buffers as they are. Packed parameters keep their bits.

    Returns:
        Bytes and words of all ranks.

    Raises:
        ValueError: For ``anchor_every`` that is no count, a ``dtype`` of integers, ``compressed``
            without the packages of ``fcdp[differences]``, and where nothing is to be published; on
            every rank, for a model of which ranks have other values under one name.
        ImportError: Without safetensors.
        RuntimeError: On every rank if any rank could not write, or had no memory; the next
            publication starts anew.

    Example:
        >>> first = fcdp.publish(model, directory)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> fcdp.publish(model, directory).version
        2
        >>> reader = fcdp.Subscriber(directory)
        >>> reader.update(), sorted(reader.state)[0]
        (2, 'blocks.0.bias')
    """
    if type(anchor_every) is not int or anchor_every < 1:
        raise ValueError(f"anchor_every = {anchor_every!r}: must be a whole number, 1 or more")
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and not floating:
        raise ValueError(
            f"dtype = {dtype!r}: must be a torch.dtype of floating-point numbers, or None"
        )
    library()
    engine = engine_of(model)
    if compressed:
        on_all_ranks("compressed = True", engine.topology, prepare)
    engine.controller.conclude()
    options = _Options(
        place=os.fspath(place),
        anchor_every=anchor_every,
        compressed=compressed,
        trainable_only=trainable_only,
        dtype=dtype,
    )
    # Taken out until it succeeds: a publisher that has failed is not used again.
    publisher = model.__dict__.pop(_ATTRIBUTE, None)
    if publisher is None or publisher.options != options:
        publisher = _Publisher(model, engine, options)
    published: Publication = publisher.publish(model)
    setattr(model, _ATTRIBUTE, publisher)
    return published


@dataclass(frozen=True, kw_only=True)
class _Options:
    place: str
    anchor_every: int
    compressed: bool
    trainable_only: bool
    dtype: torch.dtype | None


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """This rank's parts of the model; equal to others as long as a difference suffices."""

    #: Data type by part: what is trained, and buffers.
    followed: dict[Part, torch.dtype]
    #: Checksum by part.
    frozen: dict[Part, int]
    dtypes: dict[str, torch.dtype]
    blocks: dict[Part, torch.Tensor] = field(compare=False)


class _Publisher:
    """One rank's side of publishing one model to one place."""

    def __init__(self, model: nn.Module, engine: Engine, options: _Options) -> None:
        self._engine = engine
        self.options = options
        # Not the model's parameters: those of a unit that stays gathered are no shards.
        tensors, _ = split(model)
        followed = (pair for pair in tensors.items() if _follows(pair[1], options))
        check_one_value(dict(followed), engine.topology)
        meshes = {each.device_mesh for each in tensors.values() if isinstance(each, DTensor)}
        ranks = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
        self._part, self._parts = ranks.index(dist.get_rank()), len(ranks)
        self._what = f"place = {options.place}"
        self._place = on_all_ranks(self._what, engine.topology, lambda: Place(options.place))
        highest = on_all_ranks(self._what, engine.topology, self._place.highest)
        # All go on from the version that the first sees: others may see part of the next already.
        first: list[Any] = [highest, secrets.token_hex(8)]
        mesh = max(meshes, key=DeviceMesh.size)
        for dim in range(mesh.ndim):
            dist.broadcast_object_list(first, group=mesh.get_group(dim), group_src=0)
        #: The last version, and the id by which its files differ from those of other publishers.
        self._version, self._run = first
        self._contents: _Contents | None = None
        #: Versions of the last anchor, and of what is frozen.
        self._anchored = self._froze = 0
        #: By dtype, what readers of the last version hold of this rank's parts, flat.
        self._sent: dict[torch.dtype, torch.Tensor] = {}

    def publish(self, model: nn.Module) -> Publication:
        options, topology = self.options, self._engine.topology
        contents = on_all_ranks(self._what, topology, lambda: self._contents_of(model))
        (renewed,) = any_rank([contents != self._contents], topology)
        self._contents = contents
        self._version += 1
        anchors = renewed or self._version - self._anchored >= options.anchor_every
        by_dtype = defaultdict(list)
        for part, dtype in contents.followed.items():
            by_dtype[dtype].append(part)
        if anchors:
            self._anchored = self._version
        if renewed:
            self._froze = 0 if options.trainable_only else self._version

        def write() -> tuple[list[int], dict[torch.dtype, torch.Tensor]]:
            now = {
                dtype: flattened([contents.blocks[part] for part in parts], dtype)
                for dtype, parts in by_dtype.items()
            }
            total = sum(values.numel() for values in now.values())
            changed, delta_bytes, anchor_bytes = total, 0, 0
            if renewed and not options.trainable_only:
                anchor_bytes += self._put_whole("frozen", contents.frozen)
            if anchors:
                anchor_bytes += self._put_whole("anchors", contents.followed)
            if not renewed:
                tensors, names, changed = self._difference(by_dtype, now)
                sparsity = 1 - changed / max(1, total)
                about = {"sparsity": f"{sparsity:.6f}", "changed_params": json.dumps(names)}
                delta_bytes = self._put("deltas", tensors, {"sparse": "True", **about})
            return [total, changed, delta_bytes, anchor_bytes], now

        counts, self._sent = on_all_ranks(self._what, topology, write)
        sums = on_every_rank(torch.tensor(counts, device="cpu"), topology).sum(0)
        followed, changed, delta_bytes, anchor_bytes = map(int, sums.tolist())
        return Publication(
            self._version,
            words=followed,
            changed=changed,
            delta_bytes=delta_bytes,
            anchor_bytes=anchor_bytes,
        )

    def _contents_of(self, model: nn.Module) -> _Contents:
        gathered = {
            id(param): dtype
            for unit in self._engine.units
            for at, (param, (_, dtype)) in enumerate(zip(unit.params, unit.parts, strict=True))
            if at not in unit.packed
        }
        contents = _Contents(followed={}, frozen={}, dtypes={}, blocks={})
        tensors = split(model)[0]
        codes = {*map(id, coded(model))}
        tensors = {name: each for name, each in tensors.items() if _follows(each, self.options)}
        if not tensors:
            raise ValueError("model: no parameter has requires_grad: nothing is to be published")
        pieces = [
            (key, value, piece)
            for name, value in tensors.items()
            for key, piece in opened(name, value).items()
        ]
        for name, value, piece in pieces:
            block = piece.to_local() if isinstance(piece, DTensor) else piece
            part = _part_of(name, piece)
            if part is None or not (self._part == 0 or isinstance(value, DTensor)):
                continue  # another rank's
            contents.blocks[part] = block.detach()
            dtype = self.options.dtype or gathered.get(id(value), value.dtype)
            packed = is_packed(value) or id(value) in codes
            rounds = value.is_floating_point() and not packed
            contents.dtypes[name] = dtype if rounds else piece.dtype
            if isinstance(value, nn.Parameter) and not value.requires_grad:
                contents.frozen[part] = int(checksum(block.detach()))
            else:
                contents.followed[part] = contents.dtypes[name]
        return contents

    def _put_whole(self, kind: Kind, parts: Iterable[Part]) -> int:
        contents = self._contents
        assert contents is not None
        tensors = {
            part.name: flattened([contents.blocks[part]], contents.dtypes[part.name]).view(
                part.sizes
            )
            for part in parts
        }
        lie = json.dumps({part.name: [part.shape, part.offsets] for part in parts})
        about = {"sparse": "False", "sparsity": "0.0", "parts": lie, "frozen": str(self._froze)}
        return self._put(kind, tensors, about)

    def _put(
        self, kind: Kind, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
    ) -> int:
        data = pack(tensors, {"model_version": str(self._version), "run": self._run, **about})
        file = File(kind, self._version, part=self._part, parts=self._parts)
        self._place.write(file, data)
        return len(data)

    def _difference(
        self,
        by_dtype: Mapping[torch.dtype, Sequence[Part]],
        now: Mapping[torch.dtype, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], list[str], int]:
        """Tensors of the file, names of what changed (not where it is compressed), and words."""
        tensors: dict[str, torch.Tensor] = {}
        names, changed = [], 0
        for dtype, parts in by_dtype.items():
            new, old = now[dtype], self._sent[dtype]
            differs = words(new) != words(old)
            count = int(differs.sum())
            changed += count
            if count and self.options.compressed and dtype in message.DTYPES:
                encoded = message.write(new, old, self._version - 1, coding="ordered")
                tensors[f"{COMPRESSED}{dtype}"] = encoded
                continue
            sizes = [part.numel for part in parts]
            for part, values, flags in zip(
                parts, new.split(sizes), differs.split(sizes), strict=True
            ):
                if (at := places(flags)).numel():
                    tensors[f"{part.name}.indices"] = part.flat(at)
                    tensors[f"{part.name}.values"] = values.index_select(0, at)
                    names.append(part.name)
        return tensors, names, changed


def _follows(tensor: torch.Tensor, options: _Options) -> bool:
    """Whether readers have it."""
    return tensor.requires_grad or not options.trainable_only


def _part_of(name: str, value: torch.Tensor) -> Part | None:
    """Part of a tensor that this rank publishes; nothing of a copy that another has first."""
    if not isinstance(value, DTensor):
        shape = tuple(value.shape)
        return Part(name, shape, offsets=(0,) * value.ndim, sizes=shape)
    (chunk,) = value.__create_chunk_list__()
    place = value.device_mesh.get_coordinate() or ()
    copies = [at for at, how in zip(place, value.placements, strict=True) if how.is_replicate()]
    if any(copies) or not chunk.sizes.numel():
        return None
    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
    return Part(name, tuple(value.shape), offsets=offsets, sizes=sizes)
