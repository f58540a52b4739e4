"""Which files are a version, what they may tell, and which state they may be written to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.publication.parts import Part
from fcdp.publication.patch import pack
from fcdp.publication.place import File, Place
from fcdp.publication.publisher import _Publisher
from tests.fcdp.publication.test_publication import BF16, Run
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 4, 5), torch.int32), ((2**16, 2**16, 1), torch.int64)]
)
def test_places_of_a_part_are_those_of_the_whole_flat_tensor(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    part = Part("weight", shape, (shape[0] - 2, shape[1] - 1, 0), (2, 1, 1))
    found = part.flat(torch.arange(part.numel))
    last = shape[0] * shape[1] * shape[2] - shape[2]
    assert found.dtype == dtype
    assert found.tolist() == [last - shape[1] * shape[2], last]


def test_files_of_runs_of_other_sizes_are_no_version_together(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for part, parts in ((0, 2), (0, 4), (3, 4)):
        place.write(File("deltas", 1, part, parts), b"")
    assert place.whole("deltas") == {}
    place.write(File("deltas", 2, 0, 1), b"")
    assert place.whole("deltas") == {2: [File("deltas", 2, 0, 1)]}


def test_a_zero_that_has_changed_its_sign_is_told() -> None:
    part, dtype = Part("weight", (2,), (0,), (2,)), torch.bfloat16
    before, now = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([-0.0, 1.0], dtype=dtype)
    publisher: Any = SimpleNamespace(
        _sent={dtype: before}, _options=SimpleNamespace(compressed=False)
    )
    tensors, names, changed = _Publisher._difference(publisher, {dtype: [part]}, {dtype: now})
    assert (names, changed, tensors["weight.indices"].tolist()) == (["weight"], 1, [0])


def test_a_file_of_another_version_than_its_name_says_is_refused(tmp_path: Path) -> None:
    data = pack({"weight": torch.ones(1)}, {"model_version": "2", "parts": "{}", "frozen": "0"})
    Place(tmp_path).write(File("anchors", 1, 0, 1), data)
    with pytest.raises(ValueError, match="is of version 2: was it renamed"):
        fcdp.Subscriber(tmp_path).update()


def test_a_state_of_another_dtype_is_left_alone(tmp_path: Path) -> None:
    reader = fcdp.Subscriber(tmp_path, {"weight": torch.zeros(2)})
    values = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weight is torch.float32 \(2,\); must be .*bfloat16"):
        reader._write([("weight", Part("weight", (2,), (0,), (2,)), values)])
    assert reader.state["weight"].tolist() == [0.0, 0.0]


@on_ranks(4)
def test_all_ranks_go_on_behind_what_the_first_has_found(tmp_path: Path) -> None:
    """Another one sees a part of a later version already."""
    run = Run(BF16, tmp_path, {})
    with mock.patch.object(Place, "highest", return_value=6 * (run.topology.rank == 2)):
        assert run.publish().version == 1
