"""A damaged or forged checkpoint is refused on every rank; model and optimizer stay as they were.

The suite damages each file at five random places, ``pytest --exhaustive`` at fifty.
"""

import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from fcdp.checkpoint import commit, files
from tests.fcdp.checkpoints import Run, assert_equal, contents, trained
from tests.ranks import Pools, on_ranks

FILES = ("state.pt", ".metadata", "__0_0.distcp", "__1_0.distcp")


def path_of(directory: Path, name: str) -> Path:
    if name == "state.pt":
        return directory / name
    (shards,) = directory.glob("shards-*")
    return shards / name


@contextmanager
def changed(path: Path, rank: int, change: Callable[[Path], object]) -> Iterator[None]:
    """Have rank 0 change a file that all ranks read, and undo it."""
    backup = path.with_name(f"kept-{path.name}")
    dist.barrier()  # the others may still look at it
    if rank == 0:
        shutil.copy(path, backup)
        change(path)
    dist.barrier()
    try:
        yield
    finally:
        dist.barrier()
        if rank == 0:
            if path.is_dir():
                path.rmdir()
            os.replace(backup, path)
        dist.barrier()


def refusal_of(run: Run, directory: Path) -> str:
    """Return the message of a load, which raises ``ValueError`` within a minute."""
    start = time.monotonic()
    with pytest.raises(ValueError, match=".") as error:
        run.load(directory)
    assert time.monotonic() - start < 60
    return str(error.value)


def flipped(place: int, mask: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= mask
        path.write_bytes(data)

    return change


def cut(place: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, place)


def random_damage(size: int, number: int) -> dict[str, Callable[[Path], object]]:
    """Flips and cuts at ``number`` random places each, and at the ends."""
    draw = random.Random(number)
    places = [0, size - 1, *(draw.randrange(size) for _ in range(number))]
    masks = [1, 0x80, *(draw.randrange(1, 256) for _ in range(number))]
    flips = {
        f"flip {place}": flipped(place, mask) for place, mask in zip(places, masks, strict=True)
    }
    return {**flips, **{f"cut {place}": cut(place) for place in places}}


def fill_padding(path: Path) -> None:
    """Change bytes that no reader of the format looks at."""
    data = path.read_bytes()
    assert b"ZZZZ" in data
    path.write_bytes(data.replace(b"ZZZZ", b"ZZZY", 1))
    assert torch.load(path, weights_only=True) if path.name == "state.pt" else True


def strip_checksum(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save(state, path)


def swap_shards(path: Path) -> None:
    other = path.with_name("__0_0.distcp")
    assert other.stat().st_size != path.stat().st_size
    shutil.copy(other, path)


Damage = tuple[Callable[[Path], object], str]
DAMAGE: Mapping[str, Damage] = {
    "missing": (Path.unlink, "missing"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes"),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), ""),
    "text": (lambda path: path.write_text("{}" * (path.stat().st_size // 2)), ""),
    "directory": (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file"),
}


def damage_of(path: Path, number: int) -> dict[str, Damage]:
    """Return damage that may befall a file, with the words of its error besides the name."""
    damage: dict[str, Damage] = {}
    for what, change in random_damage(path.stat().st_size, number).items():
        words = "are not as saved" if "flip" in what else "bytes; must have"
        damage[what] = change, "" if path.name == "state.pt" else words
    damage |= DAMAGE
    if path.name != ".metadata":
        damage["padding"] = fill_padding, ""
    if path.name == "__1_0.distcp":
        damage["swapped"] = swap_shards, ""
    if path.name == "state.pt":
        damage["stripped"] = strip_checksum, "by a version of FCDP without checksums"
    return damage


def load_damaged(directory: Path, name: str, number: int) -> None:
    run = trained(directory)
    path = path_of(directory, name)
    before = contents(run)
    for what, (change, words) in damage_of(path, number).items():
        with changed(path, run.topology.rank, change):
            message = refusal_of(run, directory)
        # Where a file is lost, the folder is named, and what it lacks.
        named = [str(path)] if what.startswith(("flip", "cut")) else [str(directory), name]
        for expected in (*named, words):
            assert expected in message, (what, message)
    assert_equal(contents(run), before)
    run.load(directory)  # undamaged, it does load
    assert run.params()["norm.weight"].ne(before["norm.weight"]).any()


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_damaged_lost_or_replaced_is_refused(
    ranks: Pools, tmp_path: Path, request: pytest.FixtureRequest, name: str
) -> None:
    number = 50 if request.config.getoption("--exhaustive") else 5
    ranks.run(2, load_damaged, tmp_path, name, number)


@on_ranks(2)
def test_ranks_that_see_different_checkpoints_load_none(tmp_path: Path) -> None:
    """Rank 1 is on a node that has another checkpoint, of another step, in this place."""
    run = trained(tmp_path / "rank 0")
    run.save(tmp_path / "rank 1")
    before = contents(run)
    message = refusal_of(run, tmp_path / f"rank {run.topology.rank}")
    assert_equal(contents(run), before)
    assert (": rank 1: " in message) == (run.topology.rank == 0), message
    assert "rank 1/shards-" in message, message
    assert "is missing; must be on a file system that all nodes share" in message, message


# --- Forged: the checksums are right


def forge(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change what ``state.pt`` says, and its checksum to match."""

    def write(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        change(state)
        with open(path, "wb") as file:
            torch.save(state, file)
        path.write_bytes(commit._sealed(path.read_bytes()))

    return write


class Bomb:
    """Pickled, it makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


FORGED: Mapping[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "above": (lambda state: state.update(shards="../other"), "name = '../other': leads out"),
    "parent": (lambda state: state.update(shards=".."), "name = '..': leads out"),
    "absolute": (lambda state: state.update(shards="/tmp"), "name = '/tmp': leads out"),
    "below": (lambda state: state.update(shards="a/b"), "name = 'a/b': leads out"),
    "number": (lambda state: state.update(shards=3), "TypeError"),
    "file": (
        lambda state: state["layout"]["files"][0].update(name="../other/.metadata"),
        "leads out",
    ),
    "key": (lambda state: state.pop("layout"), "KeyError: 'layout'"),
    "format": (lambda state: state.update(format=3), "format = 3: must be 2"),
    "foreign": (
        lambda state: state["optimizer"]["state"].update(another={}),
        "of another, which is in no parameter group",
    ),
    "offset": (lambda state: shift_chunks(state["layout"]), "cannot be read: rank"),
}


def shift_chunks(layout: dict[str, Any]) -> None:
    for tensor in layout["tensors"].values():
        tensor["chunks"][:, 1] += 1


@on_ranks(2)
def test_a_forged_description_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path / "checkpoint")
    where = tmp_path / "checkpoint"
    path = where / "state.pt"
    if run.topology.rank == 0:
        (shards,) = where.glob("shards-*")
        shutil.copytree(shards, tmp_path / "other")
    for case, (change, words) in FORGED.items():
        with changed(path, run.topology.rank, forge(change)):
            message = refusal_of(run, where)
        assert words in message, (case, message)


@on_ranks(2)
def test_no_pickle_from_disk_is_run(tmp_path: Path) -> None:
    """A pickle that runs code takes the place of either file, with all checksums right."""
    run = trained(tmp_path / "checkpoint")
    where, exploded = tmp_path / "checkpoint", tmp_path / "exploded"
    state, metadata = path_of(where, "state.pt"), path_of(where, ".metadata")

    def seal_bomb(path: Path) -> None:
        with open(path, "wb") as file:
            torch.save({"shards": Bomb(exploded)}, file)
        path.write_bytes(commit._sealed(path.read_bytes()))

    with changed(state, run.topology.rank, seal_bomb):
        message = refusal_of(run, where)
    assert "state.pt: is not what fcdp.save writes: UnpicklingError" in message, message

    def describe_bomb(saved: dict[str, Any]) -> None:
        data = metadata.read_bytes()
        checksum = files.Checksum()
        checksum.update(memoryview(data))
        (file,) = (file for file in saved["layout"]["files"] if file["name"] == ".metadata")
        file.update(size=len(data), crc32=torch.tensor(checksum.crcs))

    write_bomb = pickle.dumps(Bomb(exploded))
    with (
        changed(metadata, run.topology.rank, lambda path: path.write_bytes(write_bomb)),
        changed(state, run.topology.rank, forge(describe_bomb)),
    ):
        run.load(where)
    assert not exploded.exists()


# --- Other programs


@on_ranks(2)
def test_the_shards_are_a_checkpoint_of_pytorch(tmp_path: Path) -> None:
    """Its own reader takes the folder of shards."""
    run = trained(tmp_path)
    run.load(tmp_path)
    (shards,) = tmp_path.glob("shards-*")
    state = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    del state["model.head.weight"]  # tied to the embedding
    empty = {name: torch.zeros_like(value) for name, value in state.items()}
    torch.distributed.checkpoint.load(empty, storage_reader=FileSystemReader(shards))
    for name, value in state.items():
        assert torch.equal(empty[name].full_tensor(), value.full_tensor()), name


# --- Blocks


def test_blocks_are_shared_out_and_each_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks there are for however many files, every byte is read by one of them."""
    monkeypatch.setattr(files, "BLOCK", 8)
    draw = random.Random(0)
    written = {"a": draw.randbytes(41), "b": b"", "c": draw.randbytes(8)}
    writer = files.SummingFileSystem()
    for name, data in written.items():
        with writer.create_stream(tmp_path / name, "wb") as stream:
            for start in range(0, len(data), 5):
                stream.write(data[start : start + 5])
    assert {name: len(file.crcs) for name, file in writer.sums.items()} == {"a": 6, "b": 0, "c": 1}

    def finders(parts: int) -> list[int]:
        failed = []
        for part in range(parts):
            try:
                files.check_files(tmp_path, writer.sums, part=part, parts=parts)
            except ValueError:
                failed.append(part)
        return failed

    for parts in (1, 2, 3, 20):
        assert finders(parts) == []
        for name, data in written.items():
            for place in range(len(data)):
                (tmp_path / name).write_bytes(
                    data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                )
                assert len(finders(parts)) == 1, (name, place)
            (tmp_path / name).write_bytes(data + b"x")
            assert bool(finders(parts)) == bool(data), name
            (tmp_path / name).unlink()
            assert bool(finders(parts)) == bool(data), name
            (tmp_path / name).write_bytes(data)
