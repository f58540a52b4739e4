"""Images, their models and optimizers in matrix files; the papers' recipes."""

import importlib.util
from pathlib import Path

import pytest

from baselines.optimizers import SGD, AdamW, Decay
from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.workload import NEEDED, Convolutional, Images, ResNet
from tests.experiments.matrix.test_reader import FILE, LLAMA, TUNING, read

GPT2 = "name: gpt2-a, family: gpt2, layers: 2, width: 16, heads: 2"
LENGTH = "  sequence_length: 16\n"
IMAGES = (
    FILE.replace(GPT2, "name: cnn, family: convolutional, layers: 2, width: 4")
    .replace(LLAMA, "name: resnet, family: resnet, layers: 18")
    .replace("[gpt2-a, llama-b]", "[cnn, resnet]")
    .replace(LENGTH, "  data: {images: digits}\n")
)


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
    entries = read(tmp_path, text=IMAGES).cells
    cells = [entry.cell for entry in entries]
    assert {cell.model for cell in cells} == {
        Convolutional(name="cnn", family="convolutional", layers=2, width=4),
        ResNet(name="resnet", family="resnet", layers=18),
    }
    assert {entry.skip_reason for entry in entries} == {None, "not interesting"}
    for cell in cells:
        assert cell.data == Images(images="digits")
        assert (cell.sequence_length, cell.tokens_per_step) == (1, 4 * cell.accumulation)
        assert type(cell).model_validate_json(cell.model_dump_json()) == cell
        assert cell.origin.key("data", "images") == "example.yaml:17: workload.data.images"


def test_without_what_reads_them_cells_are_skipped_and_they_are_not_simulated(
    tmp_path: Path, packages: dict[str, bool]
) -> None:
    packages["sklearn"] = False
    reasons = {entry.skip_reason for entry in read(tmp_path, text=IMAGES).cells}
    assert reasons == {"not interesting", f"{NEEDED}; there is no sklearn here"}
    reasons = {entry.skip_reason for entry in read(tmp_path, text=IMAGES, simulated=True).cells}
    assert "is not simulated: cnn classifies images; language models are simulated alone" in reasons
    assert None not in reasons


def test_optimizers(tmp_path: Path) -> None:
    decayed = "{kind: sgd, weight_decay: 0.1, decay: {every: 3, by: 0.5}}"
    silent, usual, changed = (
        [entry.cell for entry in read(tmp_path, (TUNING, f"{TUNING}{more}"), text=IMAGES).cells]
        for more in ("", "\n  optimizer: {kind: adamw}", f"\n  optimizer: {decayed}")
    )
    assert {cell.optimizer for cell in silent} == {AdamW()}
    assert [cell.id for cell in usual] == [cell.id for cell in silent]
    expected = SGD(kind="sgd", weight_decay=0.1, decay=Decay(every=3, by=0.5))
    assert {cell.optimizer for cell in changed} == {expected}


DIGITS = "{images: digits}"
MISTAKES = [
    (DIGITS, "{images: digits, folder: here}",
     "17: workload.data.folder: is not for digits, which scikit-learn brings"),
    (DIGITS, "{images: cifar-10}",
     "17: workload.data: folder is missing: the one that cifar-10 lies in"),
    (DIGITS, "{images: imagenet, folder: gone}",
     "17: workload.data.folder: there is no file or folder gone beside this matrix file"),
    (DIGITS, "{library: python}",
     "17: workload.data: standard library and model cnn do not go together: models of family "
     "convolutional and resnet train on images, all others on text"),
    (DIGITS, "{images: digits}\n  sequence_length: 4",
     "18: workload.sequence_length: 4 is not allowed: an image is 1; leave it out"),
    ("tuning: full", "tuning: lora",
     "16: workload.tuning: lora is not allowed: models of images train in full"),
    ("layers: 18", "layers: 34",
     "6: models[1].layers: 34 is not allowed: input should be 18 or 50"),
    ("- deepspeed-zero3", "- pipeline",
     "9: axes.strategy[0]: pipeline is not allowed on images: blocks of text's models hand on one "
     "shape, those of images' do not"),
    (TUNING, f"{TUNING}\n  optimizer: {{kind: sgdm}}",
     "17: workload.optimizer.kind: unknown optimizer 'sgdm'; did you mean 'sgd'? allowed: adamw, "
     "sgd"),
    (TUNING, f"{TUNING}\n  optimizer: sgd",
     "17: workload.optimizer: 'sgd' is not a mapping such as {kind: sgd}"),
    (TUNING, f"{TUNING}\n  optimizer: {{kind: sgd, momentum: 1.0}}",
     "17: workload.optimizer.momentum: 1.0 is not allowed: input should be less than 1"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES)
def test_mistakes_name_line_and_key(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^example\.yaml:") as raised:
        read(tmp_path, (old, new), text=IMAGES)
    assert str(raised.value) == f"example.yaml:{problem}"


def test_text_has_sequences(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_length: 1 is not allowed: text has 2 tokens"):
        read(tmp_path, (LENGTH, ""))


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
    assert [entry.skip_reason for entry in matrix.cells] == [None] * cells
