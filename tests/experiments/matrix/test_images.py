"""Images and their models in matrix files; the papers' recipes."""

import importlib.util
from pathlib import Path

import pytest

from baselines.optimizers import SGD, Decay
from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.workload import Convolutional, Images, ResNet, needed
from tests.experiments.matrix.files import IMAGES, TUNING, read


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Packages, and whether they are installed as far as matrices can see."""
    installed = {"sklearn": True, "torchvision": True, "datasets": True}
    look = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: installed[name] if name in installed else look(name, *rest),
    )
    return installed


def test_models_of_images_train_on_images(tmp_path: Path) -> None:
    matrix = read(tmp_path, text=IMAGES)
    cells = matrix.cells
    assert {cell.model for cell in cells} == {
        Convolutional(name="cnn", family="convolutional", layers=2, width=4),
        ResNet(name="resnet", family="resnet", layers=18),
    }
    assert {*matrix.skipped.values()} == {"not interesting"}
    for cell in cells:
        assert cell.data == Images(images="digits")
        assert (cell.sequence_length, cell.tokens_per_step) == (1, 4 * cell.accumulation)
        assert type(cell).model_validate_json(cell.model_dump_json()) == cell
        assert cell.origin.key("data", "images") == "example.yaml:17: workload.data.images"


def test_without_what_reads_them_cells_are_skipped_and_they_are_not_simulated(
    tmp_path: Path, packages: dict[str, bool]
) -> None:
    packages["sklearn"] = False
    matrix = read(tmp_path, text=IMAGES)
    missing = f"{needed('images')}; there is no sklearn here"
    assert {*matrix.skipped.values()} == {"not interesting", missing}
    assert not matrix.running
    assert not read(tmp_path, text=IMAGES, simulated=True).running


def test_an_optimizer_is_as_the_file_says(tmp_path: Path) -> None:
    decayed = "optimizer: {kind: sgd, weight_decay: 0.1, decay: {every: 3, by: 0.5}}"
    cells = read(tmp_path, (TUNING, f"{TUNING}\n  {decayed}"), text=IMAGES).cells
    expected = SGD(kind="sgd", weight_decay=0.1, decay=Decay(every=3, by=0.5))
    assert {cell.optimizer for cell in cells} == {expected}


@pytest.mark.parametrize(
    ("name", "missing", "folders", "cells"),
    [
        ("cyclic-cifar-10", "data/cifar-10", ["cifar-10"], 9),
        ("cyclic-imagenet", "data/imagenet", ["imagenet"], 6),
        ("co2-wikitext", "./data/wikitext", ["wikitext", "gpt2"], 2),
    ],
)
def test_recipes_say_what_is_missing(
    tmp_path: Path, name: str, missing: str, folders: list[str], cells: int
) -> None:
    file = tmp_path / f"{name}.yaml"
    recipe = ROOT / "experiments/recipes" / file.name
    file.write_text(recipe.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match=f"there is no file or folder {missing} beside"):
        reader.read(str(file))
    for folder in folders:
        (tmp_path / "data" / folder).mkdir(parents=True)
    matrix = reader.read(str(file))
    assert matrix.name == name
    assert len(matrix.running) == len(matrix.cells) == cells
