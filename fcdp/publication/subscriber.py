"""Reading what a trainer publishes, in any process that has torch and safetensors."""

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping

import torch

from fcdp.delta import message
from fcdp.publication.files import COMPRESSED, File, Part, Place, flattened, library, unpack, words

#: A tensor of the state, which of its flat elements change (``None``: a block of it), and to what.
_Write = tuple[str, torch.Tensor | Part, torch.Tensor]


class Subscriber:
    """Follows what ``fcdp.publish`` writes, bit for bit, in a ``state_dict`` of plain tensors.

    Tensors that are there are written in place, so that a model's own ``state_dict()`` updates the
    model; those that are not are added, but to a state that has others alone.

    Args:
        place: As of ``fcdp.publish``.
        state: Tensors by name, of the published dtypes; ``None``: an empty one, which the first
            anchor fills.

    Attributes:
        state: The tensors.
        version: What they hold; ``None`` before the first.

    Raises:
        ImportError: Without safetensors.

    Example:
        >>> _ = fcdp.publish(model, directory)
        >>> reader = fcdp.Subscriber(directory)
        >>> reader.update()
        1
        >>> reader.state["blocks.0.weight"].shape
        torch.Size([8, 8])
    """

    def __init__(
        self, place: str | os.PathLike[str], state: MutableMapping[str, torch.Tensor] | None = None
    ) -> None:
        library()
        self._place = Place(place)
        self.state: MutableMapping[str, torch.Tensor] = {} if state is None else state
        self.version: int | None = None
        self._frozen = 0
        #: Which run published what is held: two may share a place, unaware of each other.
        self._run = ""
        #: Parts by dtype, whose differences a rank encodes together, by rank.
        self._parts: list[dict[str, list[Part]]] = []

    def update(self) -> int | None:
        """Apply all that is whole: differences, or an anchor where they do not lead on from here.

        Nothing of a version is applied before all of it has been read and checked.

        Returns:
            The version that the state holds now; ``None`` if there is none yet.

        Raises:
            ValueError: For a damaged file, one of another run, one that does not fit the state, or
                a compressed one without the packages of ``fcdp[differences]``, and no later anchor.
            RuntimeError: Where versions are missing that later ones lead from. After either the
                state holds ``version`` still; the next anchor heals it.
        """
        deltas = self._place.complete_versions("deltas")
        anchors = self._place.complete_versions("anchors")
        newest = max([*deltas, *anchors], default=0)
        while (self.version or 0) < newest:
            wrong: ValueError | RuntimeError = RuntimeError(
                f"{self._place.name}: has versions up to {newest}, and nothing that leads on from "
                f"{self.version}; the next anchor will"
            )
            if self.version is not None and self.version + 1 in deltas:
                try:
                    self._apply_difference(deltas[self.version + 1])
                    continue
                except ValueError as error:
                    wrong = error
            latest = max(anchors, default=0)
            if latest <= (self.version or 0):
                raise wrong
            self._apply_anchor(anchors[latest])
        return self.version

    def _apply_difference(self, files: list[File]) -> None:
        assert self.version is not None
        writes: list[_Write] = []
        for file in files:
            tensors, _ = self._read(file, self._run)
            for key, tensor in tensors.items():
                if key.startswith(COMPRESSED):
                    parts = self._parts[file.part][key.removeprefix(COMPRESSED)]
                    blocks = [part.of(self.state[part.name]) for part in parts]
                    row = flattened(blocks, blocks[0].dtype)
                    message.read(tensor, row, self.version)
                    values = row.split([part.numel for part in parts])
                    writes += [
                        (part.name, part, value) for part, value in zip(parts, values, strict=True)
                    ]
                elif key.endswith(".indices"):
                    name = key.removesuffix(".indices")
                    writes.append((name, tensor.long(), tensors[f"{name}.values"]))
        self._write(writes)
        self.version = files[0].version

    def _apply_anchor(self, files: list[File]) -> None:
        first = self._read(files[0])
        run, frozen = first[1].get("run", ""), int(first[1]["frozen"])
        read = [first, *(self._read(file, run) for file in files[1:])]
        writes: list[_Write] = []
        parts = []
        for tensors, about in read:
            by_dtype: dict[str, list[Part]] = {}
            for part, values in _blocks(tensors, about):
                by_dtype.setdefault(str(values.dtype), []).append(part)
                writes.append((part.name, part, values))
            parts.append(by_dtype)
        if frozen and (run, frozen) != (self._run, self._frozen):
            files_of = self._place.complete_versions("frozen")
            if frozen not in files_of:
                raise RuntimeError(
                    f"{self._place.name}: has no whole version {frozen} of the frozen parameters, "
                    f"which belong to {files[0].version}"
                )
            for file in files_of[frozen]:
                writes += [
                    (part.name, part, values) for part, values in _blocks(*self._read(file, run))
                ]
        self._write(writes)
        self._parts, self._frozen, self.version = parts, frozen, files[0].version
        self._run = run

    def _read(
        self, file: File, run: str | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        path = self._place.path(file)
        tensors, about = unpack(self._place.read(file), path)
        if int(about["model_version"]) != file.version:
            raise ValueError(f"{path}: is of version {about['model_version']}: was it renamed?")
        if run is not None and (actual := about.get("run", "")) != run:
            raise ValueError(
                f"{path}: run = {actual!r}: must be {run!r}, as of what it goes with; another "
                "publishes to this place"
            )
        return tensors, about

    def _write(self, writes: list[_Write]) -> None:
        """Write all or, where one does not fit, nothing."""
        names = {name for name, _, _ in writes}
        if names and self.state and names.isdisjoint(self.state):
            name, present = writes[0][0], next(iter(self.state))
            raise ValueError(f"state: has {present} and not {name}; must have the published names")
        added: dict[str, torch.Tensor] = {}
        for name, where, values in writes:
            there = self.state.get(name, added.get(name))
            if there is None and isinstance(where, Part):
                added[name] = torch.empty(where.shape, dtype=values.dtype, device="cpu")
                continue
            if (
                there is None
                or there.dtype != values.dtype
                or not there.is_contiguous()
                or (isinstance(where, Part) and there.shape != where.shape)
            ):
                is_there = "missing" if there is None else f"{there.dtype} {tuple(there.shape)}"
                raise ValueError(
                    f"state: {name} is {is_there}; must be contiguous, and as published: "
                    f"{values.dtype}{where.shape if isinstance(where, Part) else ''}"
                )
        self.state.update(added)
        with torch.no_grad():
            for name, where, values in writes:
                whole = self.state[name]
                if isinstance(where, Part):
                    where.of(whole).copy_(values.view(where.sizes))
                else:
                    flat = words(whole).view(-1)  # torch copies bits of any dtype so
                    flat.index_copy_(0, where.to(flat.device), words(values).to(flat.device))


def _blocks(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
) -> Iterator[tuple[Part, torch.Tensor]]:
    for name, (shape, offsets) in json.loads(about["parts"]).items():
        values = tensors[name]
        where = Part(name, tuple(shape), offsets=tuple(offsets), sizes=tuple(values.shape))
        yield where, values
