"""Readers hold what the trainer has, to the bit, or an earlier version, whole.

Files make up a version, are valid or refused, and fit the state or are not written to it.
"""

import gc
import http.server
import json
import shutil
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.nn as nn
from safetensors import safe_open
from torch.distributed.tensor import DTensor

import fcdp
from fcdp import durable
from fcdp.publication import publisher
from fcdp.publication.files import File, Part, Place, pack
from fcdp.publication.publisher import _Publisher
from tests.fcdp import training
from tests.fcdp.checkpoints import kill_at
from tests.fcdp.training import Settings, TinyLM, topology_of, whole
from tests.ranks import Pools, RankFailure, RankPool, on_ranks

BF16 = Settings(param_dtype=torch.bfloat16)
LORA = Settings(adapter_rank=3, param_dtype=torch.bfloat16)


def held(model: TinyLM, settings: Settings) -> dict[str, torch.Tensor]:
    """Return the whole tensors that the forward computes with."""
    return {
        name: whole(value).detach().to(settings.param_dtype).clone()
        for name, value in model.state_dict().items()
        if name != "head.weight"  # tied
    }


def equal(actual: Any, expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name].view(torch.uint8), value.view(torch.uint8)), name


class Run(training.Run):
    def __init__(
        self, settings: Settings, place: Any, options: dict[str, Any], rate: float = 1e-6
    ) -> None:
        super().__init__(settings)
        self.optimizer.param_groups[0].update(lr=rate, eps=1e-8)
        self.place, self.options = place, options

    def publish(self) -> fcdp.Publication:
        return fcdp.publish(self.model, self.place, **self.options)


def train_and_read(
    settings: Settings, place: Any, options: dict[str, Any], steps: int
) -> tuple[list[fcdp.Publication], dict[str, torch.Tensor]]:
    """One rank follows, and compares after each step."""
    run = Run(settings, place, options)
    reader = fcdp.Subscriber(place)
    published = []
    for version in range(1, steps + 1):
        published.append(run.publish())
        now = held(run.model, settings)
        if run.topology.rank == 1:
            assert reader.update() == version
            equal(reader.state, now)
        run.step()
    return published, now


@pytest.mark.parametrize(
    ("nodes", "compressed"),
    [((2, 1), False), ((2, 2), True), ((2, 1), True), ((2, 2), False)],
)
def test_each_version_is_read_bit_for_bit(
    ranks: Pools, tmp_path: Path, nodes: tuple[int, int], compressed: bool
) -> None:
    settings = Settings(*nodes, param_dtype=torch.bfloat16)
    options = {"anchor_every": 4, "compressed": compressed}
    results = ranks.run(settings.world_size, train_and_read, settings, tmp_path, options, 7)
    published, last = results[0]
    assert all(others == published for others, _ in results)
    late = fcdp.Subscriber(tmp_path)
    assert late.update() == 7
    equal(late.state, last)
    anchors = [each.version for each in published if each.anchor_bytes]
    assert anchors == [1, 5]
    assert 0 < published[3].changed < published[3].words
    files = {path.name for path in (tmp_path / "deltas").iterdir()}
    assert len(files) == 6 * settings.world_size


def cast_and_read(place: Path, dtype: torch.dtype) -> set[torch.dtype]:
    """Dtypes of what is published of a model that was cast after FCDP was set up."""
    run = Run(Settings(2, 1), place, {})
    run.model.to(dtype)
    run.publish()
    reader = fcdp.Subscriber(place)
    reader.update()
    return {tensor.dtype for tensor in reader.state.values()}


def test_a_model_that_was_cast_is_published_as_it_is_gathered(ranks: Pools, tmp_path: Path) -> None:
    assert ranks.run(2, cast_and_read, tmp_path, torch.bfloat16) == [{torch.bfloat16}] * 2


class FourBits(nn.Linear):
    """A layer with codes for a weight, as bitsandbytes has it with a storage of float32."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        # NaNs of each kind, which no cast keeps; and what bfloat16 would round.
        words = torch.tensor([0x7F812345, -0x7EDCBB, 0x7FC00001, 0x3F800001], dtype=torch.int32)
        self.weight = nn.Parameter(words.view(torch.float32)[:, None], requires_grad=False)
        self.quant_state = object()


@on_ranks(2)
def test_packed_codes_keep_their_bits_where_numbers_are_rounded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), FourBits())
    codes = model[1].weight.detach().clone()
    fcdp.shard(model, topology_of(2, 1), units=model)
    fcdp.publish(model, tmp_path, dtype=torch.bfloat16)
    reader = fcdp.Subscriber(tmp_path)
    reader.update()
    equal({"codes": reader.state.pop("1.weight")}, {"codes": codes})
    assert {each.dtype for each in reader.state.values()} == {torch.bfloat16}


def test_files_are_those_of_trl(ranks: Pools, tmp_path: Path) -> None:
    """Read as TRL's and vLLM's side reads them: names and flat indices, no word of ours."""
    results = ranks.run(4, train_and_read, BF16, tmp_path, {"anchor_every": 99}, 2)
    first = fcdp.Subscriber(tmp_path / "before")
    shutil.copytree(tmp_path / "anchors", tmp_path / "before" / "anchors")
    shutil.copytree(tmp_path / "frozen", tmp_path / "before" / "frozen")
    assert first.update() == 1
    changed = 0
    for path in sorted((tmp_path / "deltas").iterdir()):
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            assert (about["sparse"], about["model_version"]) == ("True", "2")
            for name in json.loads(about["changed_params"]):
                indices = file.get_tensor(f"{name}.indices")
                assert indices.dtype == torch.int32
                changed += indices.numel()
                first.state[name].view(-1)[indices.long()] = file.get_tensor(f"{name}.values")
    equal(first.state, results[0][1])
    assert changed == results[0][0][1].changed > 0


@pytest.mark.parametrize("trainable_only", [False, True])
@on_ranks(4)
def test_frozen_parameters_are_written_once_or_when_they_change(
    tmp_path: Path, trainable_only: bool
) -> None:
    run = Run(LORA, tmp_path, {"trainable_only": trainable_only, "anchor_every": 2}, rate=1e-3)
    reader = fcdp.Subscriber(tmp_path)
    published = []
    for step in range(4):
        published.append(run.publish())
        now = held(run.model, LORA)
        if trainable_only:
            now = {
                name: value for name, value in now.items() if "first" in name or "second" in name
            }
        if run.topology.rank == 0:
            reader.update()
            equal(reader.state, now)
            late = fcdp.Subscriber(tmp_path)
            late.update()
            equal(late.state, now)
        run.step()
        if step == 2:  # unseen, of what is frozen, on one rank
            if run.topology.rank == 3:
                param = run.model.blocks[1].up.weight
                assert isinstance(param, DTensor)
                param.detach().to_local().add_(1)
            fcdp.invalidate(run.model)
    first, _, third, last = published
    if trainable_only:
        assert not (tmp_path / "frozen").exists()
        assert last.changed < last.words
    else:
        assert first.anchor_bytes > third.anchor_bytes > 0
        assert last.anchor_bytes > third.anchor_bytes
        assert last.delta_bytes == 0


def publish_versions(place: Path, versions: int) -> dict[str, torch.Tensor]:
    run = Run(BF16, place, {"anchor_every": 4, "compressed": True})
    for _ in range(versions):
        run.step()
        run.publish()
    return held(run.model, BF16)


def test_gaps_and_damage_are_refused_until_an_anchor_heals_them(
    ranks: Pools, tmp_path: Path
) -> None:
    last = ranks.run(4, publish_versions, tmp_path / "all", 6)[0]

    def read_after(damage: Any, upto: int) -> fcdp.Subscriber:
        """Follow to version 2, and on where some later files are damaged."""
        place = tmp_path / "some"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "all", place)
        later = [path for path in place.rglob("step_*") if int(path.name[5:11]) > 2]
        hidden = {path: path.read_bytes() for path in later}
        for path in later:
            path.unlink()
        reader = fcdp.Subscriber(place)
        assert reader.update() == 2
        for path, data in hidden.items():
            if int(path.name[5:11]) <= upto:
                path.write_bytes(data)
        damage(place / "deltas" / "step_000003-00002-of-00004.safetensors")
        return reader

    def flip(at: int) -> Any:
        def write(path: Path) -> None:
            data = bytearray(path.read_bytes())
            data[at] ^= 16
            path.write_bytes(data)

        return write

    damages = [flip(3), flip(40), flip(-1), lambda path: path.write_bytes(path.read_bytes()[:-1])]
    for damage in [*damages, lambda path: path.write_bytes(b"")]:
        reader = read_after(damage, upto=4)
        before = {name: value.clone() for name, value in reader.state.items()}
        with pytest.raises(ValueError, match=r"step_000003-00002-of-00004.safetensors: damaged"):
            reader.update()
        assert reader.version == 2
        equal(reader.state, before)
        reader = read_after(damage, upto=6)
        assert reader.update() == 6
        equal(reader.state, last)
    reader = read_after(Path.unlink, upto=3)
    assert reader.update() == 2  # not whole yet
    reader = read_after(Path.unlink, upto=4)
    with pytest.raises(RuntimeError, match="nothing that leads on from 2"):
        reader.update()
    reader = read_after(Path.unlink, upto=6)
    assert reader.update() == 6
    equal(reader.state, last)


@on_ranks(4)
def test_a_rank_that_cannot_write_stops_all_and_the_next_starts_anew(tmp_path: Path) -> None:
    run = Run(BF16, tmp_path, {})
    run.publish()
    run.step()
    replace = durable.replace
    if run.topology.rank == 2:

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device", str(path))

        durable.replace = full
    try:
        with pytest.raises((OSError, RuntimeError), match="No space left on device"):
            run.publish()
    finally:
        durable.replace = replace
    reader = fcdp.Subscriber(tmp_path)
    assert reader.update() == 1
    run.step()
    run.publish()
    assert reader.update() == 3
    equal(reader.state, held(run.model, BF16))


@pytest.mark.parametrize("taking", ["flattened", "checksum"])
@on_ranks(2)
def test_a_rank_without_memory_stops_all_and_the_next_starts_anew(
    tmp_path: Path, taking: str
) -> None:
    settings = Settings(2, 1, adapter_rank=3, param_dtype=torch.bfloat16)
    run = Run(settings, tmp_path, {})
    own = run.topology.rank == 1
    lacks = mock.patch.object(publisher, taking, side_effect=MemoryError("no room"))
    fails = lacks if own else nullcontext()
    with fails, pytest.raises(MemoryError if own else RuntimeError, match="no room"):
        run.publish()
    run.publish()
    reader = fcdp.Subscriber(tmp_path)
    reader.update()
    equal(reader.state, held(run.model, BF16))


def publish_and_die(place: Path, rank: int, killed_at: int) -> None:
    """Publish a first version, and a second one in which one rank kills itself at some write."""
    run = Run(Settings(2, 1, param_dtype=torch.bfloat16), place, {"compressed": True})

    def keep(version: int) -> None:
        now = held(run.model, BF16)
        if run.topology.rank == 0:
            torch.save(now, f"{place}-{version}")

    keep(1)
    run.publish()
    run.step()
    keep(2)
    if run.topology.rank == rank:
        kill_at(place, killed_at, ("open", "os.rename"))
    run.publish()


#: At the draft, its renaming and the flush after it.
KILLS = [(0, 1), (1, 2), (0, 3), (1, 1), (0, 2), (1, 3)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "killed_at" in metafunc.fixturenames:
        number = len(KILLS) if metafunc.config.getoption("--exhaustive") else 3
        metafunc.parametrize(("rank", "killed_at"), KILLS[:number])


def test_writers_that_are_killed_leave_versions_whole(
    ranks: Pools, tmp_path: Path, rank: int, killed_at: int
) -> None:
    """Another run then goes on in the same place."""
    pool = RankPool(2)
    with pytest.raises(RankFailure, match="its process has ended"):
        pool.run(publish_and_die, tmp_path, rank, killed_at)
    pool.close()
    reader = fcdp.Subscriber(tmp_path)
    version = reader.update()
    equal(reader.state, torch.load(f"{tmp_path}-{version}"))
    last = ranks.run(4, publish_versions, tmp_path, 2)[0]
    assert (reader.update() or 0) >= 3
    equal(reader.state, last)


@on_ranks(1)
def test_any_file_system_of_fsspec() -> None:
    run = Run(Settings(1, 1, param_dtype=torch.bfloat16), "memory://rollouts/run", {})
    reader = fcdp.Subscriber(run.place)
    for _ in range(3):
        run.publish()
        reader.update()
        equal(reader.state, held(run.model, BF16))
        run.step()
    assert len(fsspec.filesystem("memory").find("/rollouts/run/deltas")) == 2


@on_ranks(4)
def test_mistakes_are_refused() -> None:
    run = Run(BF16, "unused", {"anchor_every": 0})
    with pytest.raises(ValueError, match="anchor_every = 0: must be a whole number, 1 or more"):
        run.publish()
    run.options = {"dtype": torch.int8}
    with pytest.raises(ValueError, match=r"dtype = torch.int8: must be a torch.dtype of floating"):
        run.publish()
    run.options = {"dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"dtype = 'bfloat16': must be a torch.dtype"):
        run.publish()
    run.options = {"trainable_only": True}
    for param in run.model.parameters():
        param.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter has requires_grad"):
        run.publish()


@on_ranks(2)
def test_a_model_that_stays_gathered_is_published_in_eight_bits(tmp_path: Path) -> None:
    """Its parameters are no shards until they are asked for."""
    settings = Settings(2, 1, param_dtype=torch.float8_e4m3fn)
    run = Run(Settings(2, 1, reshard_after_forward=False), tmp_path, {}, rate=1e-2)
    run.options = {"dtype": settings.param_dtype}
    reader = fcdp.Subscriber(tmp_path)
    for version in (1, 2):
        with torch.no_grad():
            run.loss()
        assert not any(isinstance(param, DTensor) for param in run.model.parameters())
        run.publish()
        assert reader.update() == version
        equal(reader.state, held(run.model, settings))
        run.step()


@on_ranks(1)
def test_a_published_model_goes_with_the_last_who_holds_it(tmp_path: Path) -> None:
    run = Run(Settings(1, 1), tmp_path, {})
    run.publish()
    model = weakref.ref(run.model)
    del run
    gc.collect()
    assert model() is None


@on_ranks(1)
def test_two_that_publish_to_one_place_are_never_mixed(tmp_path: Path) -> None:
    settings = Settings(1, 1, param_dtype=torch.bfloat16)
    one, other = (Run(settings, tmp_path, {"anchor_every": 3}, rate=1e-2) for _ in range(2))
    reader = fcdp.Subscriber(tmp_path)
    one.publish()
    reader.update()
    other.step()
    other.publish()
    one.step()
    one.step()
    assert one.publish().version == reader.update() == 2
    other.publish()
    with pytest.raises(ValueError, match=r"step_000003.*run = .*must be .*publishes to this place"):
        reader.update()
    equal(reader.state, held(one.model, settings))
    other.publish()
    assert other.publish().anchor_bytes
    assert reader.update() == 5
    equal(reader.state, held(other.model, settings))
    for part in range(2):
        about = {"model_version": "6", "parts": "{}", "frozen": "0", "run": str(part)}
        Place(tmp_path).write(File("anchors", 6, part, 2), pack({"weight": torch.ones(1)}, about))
    with pytest.raises(ValueError, match=r"00002-of-00002.*run = '1': must be '0'"):
        reader.update()


class Cutting(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; of differences, while ``cut``, the first half of what it says it sends."""

    cut = True

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        half = self.cut and "deltas/step" in self.path
        outputfile.write(data[: len(data) // 2] if half else data)

    def log_message(self, *_: object) -> None: ...


def test_a_transfer_that_breaks_off_is_not_applied(ranks: Pools, tmp_path: Path) -> None:
    """Over a link, as a rollout follows: what it holds stays whole, and the next try heals it."""
    settings = Settings(2, 1, param_dtype=torch.bfloat16)
    options = {"anchor_every": 99, "compressed": True}
    _, last = ranks.run(2, train_and_read, settings, tmp_path / "all", options, 3)[0]
    served = tmp_path / "served"
    for kind in ("anchors", "frozen"):
        shutil.copytree(tmp_path / "all" / kind, served / kind)
    handler = partial(Cutting, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        reader = fcdp.Subscriber(f"http://127.0.0.1:{server.server_port}")
        assert reader.update() == 1
        held = {name: value.clone() for name, value in reader.state.items()}
        shutil.copytree(tmp_path / "all" / "deltas", served / "deltas")
        with pytest.raises(Exception, match=r"payload|damaged"):
            reader.update()
        assert reader.version == 1
        equal(reader.state, held)
        with mock.patch.object(Cutting, "cut", False):
            assert reader.update() == 3
        equal(reader.state, last)
        server.shutdown()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 4, 5), torch.int32), ((2**16, 2**16, 1), torch.int64)]
)
def test_places_of_a_part_are_those_of_the_whole_flat_tensor(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    part = Part("weight", shape, offsets=(shape[0] - 2, shape[1] - 1, 0), sizes=(2, 1, 1))
    indices = part.flat(torch.arange(part.numel))
    last = shape[0] * shape[1] * shape[2] - shape[2]
    assert indices.dtype == dtype
    assert indices.tolist() == [last - shape[1] * shape[2], last]


def test_files_of_runs_of_other_sizes_are_no_version_together(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for part, parts in ((0, 2), (0, 4), (3, 4)):
        place.write(File("deltas", 1, part, parts), b"")
    assert place.complete_versions("deltas") == {}
    place.write(File("deltas", 2, 0, 1), b"")
    assert place.complete_versions("deltas") == {2: [File("deltas", 2, 0, 1)]}


def test_a_zero_that_has_changed_its_sign_is_published() -> None:
    part, dtype = Part("weight", (2,), offsets=(0,), sizes=(2,)), torch.bfloat16
    before, now = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([-0.0, 1.0], dtype=dtype)
    publisher: Any = SimpleNamespace(
        _sent={dtype: before}, options=SimpleNamespace(compressed=False)
    )
    tensors, names, changed = _Publisher._difference(publisher, {dtype: [part]}, {dtype: now})
    assert (names, changed, tensors["weight.indices"].tolist()) == (["weight"], 1, [0])


def test_a_file_of_another_version_than_its_name_says_is_refused(tmp_path: Path) -> None:
    data = pack({"weight": torch.ones(1)}, {"model_version": "2", "parts": "{}", "frozen": "0"})
    Place(tmp_path).write(File("anchors", 1, 0, 1), data)
    with pytest.raises(ValueError, match="is of version 2: was it renamed"):
        fcdp.Subscriber(tmp_path).update()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (torch.zeros(2), r"torch.float32 \(2,\); must be .*bfloat16"),
        (torch.zeros(5, dtype=torch.bfloat16), r"torch.bfloat16 \(5,\); must be"),
    ],
)
def test_a_state_that_does_not_fit_is_left_alone(
    tmp_path: Path, held: torch.Tensor, message: str
) -> None:
    reader = fcdp.Subscriber(tmp_path, {"weight": held})
    values, part = (
        torch.ones(2, dtype=torch.bfloat16),
        Part("weight", (2,), offsets=(0,), sizes=(2,)),
    )
    with pytest.raises(ValueError, match=f"weight is {message}"):
        reader._write([("other", part, values), ("weight", part, values)])
    with pytest.raises(ValueError, match="state: has weight and not module.weight; must have"):
        reader._write([("module.weight", part, values)])
    reader._write([])  # a version in which nothing has changed
    assert [*reader.state] == ["weight"]
    assert not reader.state["weight"].any()


@on_ranks(4)
def test_all_ranks_go_on_from_the_version_that_the_first_sees(tmp_path: Path) -> None:
    """Another one sees a part of a later version already."""
    run = Run(BF16, tmp_path, {})
    with mock.patch.object(Place, "highest", return_value=6 * (run.topology.rank == 2)):
        assert run.publish().version == 1
