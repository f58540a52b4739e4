"""The images that cells train on, and the networks that classify them."""

import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import TensorDataset

from experiments.records.cell import Cell
from experiments.records.workload import Convolutional, Images, Origin
from experiments.worker import convolutional, images
from experiments.worker.images import ImageWorkload, epochs
from tests.experiments.cells import cell
from tests.ranks import Pools

MODEL = Convolutional(name="cnn", family="convolutional", layers=1, width=2)
ORIGIN = Origin(data="mine.yaml:7: workload.data")
TRAINED, VALIDATION = 24, 10


@pytest.fixture(autouse=True)
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of one pixel, their number; class 1 from the tenth on. Validation has negatives."""
    numbers = torch.arange(TRAINED).float().view(-1, 1, 1, 1)
    validation = -1.0 - torch.arange(VALIDATION).view(-1, 1, 1, 1)
    source = images.Source(
        (1, 1, 1),
        2,
        lambda *_: (
            TensorDataset(numbers, (numbers.flatten() > 9).long()),
            TensorDataset(validation, (validation.flatten() > 0).long()),
        ),
    )
    monkeypatch.setitem(images.SOURCES, "digits", source)


def of(**settings: Any) -> Cell:
    common = {"model": MODEL, "data": Images(images="digits"), "sequence_length": 1}
    return cell("fcdp", **{**common, "micro_batch": 3, "origin": ORIGIN, **settings})


def workload(cell: Cell, rank: int = 0, ranks: int = 4) -> ImageWorkload:
    return ImageWorkload(cell, cell.data, rank, ranks)


def drawn(cell: Cell, rank: int, count: int = 4) -> list[list[float]]:
    return [batch[:, 0].tolist() for batch in islice(workload(cell, rank).batches(), count)]


def test_ranks_share_each_epoch() -> None:
    """24 images are two turns of four ranks, and after them comes another order."""
    by_rank = [drawn(of(), rank) for rank in range(4)]
    first = sorted(number for batches in by_rank for batch in batches[:2] for number in batch)
    again = sorted(number for batches in by_rank for batch in batches[2:] for number in batch)
    assert first == again == list(range(TRAINED))
    assert [batches[:2] for batches in by_rank] != [batches[2:] for batches in by_rank]
    assert drawn(of(seed=1), 0) != by_rank[0] == drawn(of(seed=0), 0)


def test_what_does_not_fill_a_turn_is_left_out_of_an_epoch() -> None:
    order = epochs(TRAINED, 5, 2, seed=0)
    first = [number for batch in islice(order, 4) for number in batch]
    assert len({*first}) == 20
    assert next(order) != first[:5]


def test_images_held_out_are_spread_over_the_validation_set() -> None:
    batches = list(workload(of(held_out=5), rank=2).held_out())
    assert [batch[:, 0].tolist() for batch in batches] == [[-1.0, -3.0, -5.0], [-7.0, -9.0]]
    assert list(workload(of()).held_out()) == []


class ByNumber(nn.Module):
    """A model that says class 1 from the twelfth on, almost certainly."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.shape[1:] == (1, 1, 1)
        return torch.cat((11.5 - pixels, pixels - 11.5), 1).flatten(1) * 100


def test_loss_and_accuracy() -> None:
    image_workload, model = workload(of()), ByNumber()
    batch = images.joined([(torch.full((1, 1, 1), float(n)), int(n > 9)) for n in (8, 10, 11, 12)])
    loss, accuracy = image_workload.measure(model, batch)
    assert accuracy == 0.5
    assert loss == pytest.approx((300 + 100) / 4)
    assert image_workload.loss(model, batch) == loss
    assert image_workload.metrics == ("held_out_loss", "held_out_accuracy")


def test_more_images_than_there_are() -> None:
    message = "micro_batch = 7: 4 ranks take 28 images at a time, and digits has 24 to train on"
    with pytest.raises(ValueError, match=f"^{message}$"):
        workload(of(micro_batch=7))
    message = "held_out = 11: allowed are 0 to 10, the images of digits that are not trained on"
    with pytest.raises(ValueError, match=f"^{message}$"):
        workload(of(held_out=11))


def test_digits_are_scikit_learns() -> None:
    pytest.importorskip("sklearn", reason="the group images has it")
    training, validation = images._digits(Images(images="digits"), ORIGIN)
    assert (len(training), len(validation)) == (1437, 360)
    pixels, kind = training[0]
    assert pixels.shape == (1, 8, 8)
    assert (pixels.min(), pixels.max(), kind) == (0, 15 / 16, 0)


@pytest.mark.parametrize(
    ("module", "spec"),
    [
        ("sklearn.datasets", Images(images="digits")),
        ("torchvision", Images(images="cifar-10", folder="here")),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_group(
    monkeypatch: pytest.MonkeyPatch, module: str, spec: Images
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    read = images._digits if spec.images == "digits" else images.SOURCES["cifar-10"].read
    with pytest.raises(ValueError, match=re.escape("pip install --group images")) as raised:
        read(spec, ORIGIN)
    assert str(raised.value).startswith("mine.yaml:7: workload.data.images: needs the packages")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cifar-10", RuntimeError("Dataset not found or corrupted.")),
        ("imagenet", FileNotFoundError("no train")),
    ],
)
def test_a_folder_without_images_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    vision = mock.MagicMock()
    vision.datasets.CIFAR10.side_effect = vision.datasets.ImageFolder.side_effect = error
    monkeypatch.setitem(sys.modules, "torchvision", vision)
    (tmp_path / "empty").mkdir()
    read = images.SOURCES[name].read
    origin = ORIGIN.model_copy(update={"folder": str(tmp_path)})
    where = "mine.yaml:7: workload.data.folder: "
    with pytest.raises(ValueError, match=f"{where}empty has no {name} that torchv.*: {error}"):
        read(Images(images=name, folder="empty"), origin)
    with pytest.raises(ValueError, match=f"{where}there is no {tmp_path}/gone on this node"):
        read(Images(images=name, folder="gone"), origin)


@pytest.mark.parametrize(
    ("layers", "size", "classes", "parameters", "last"),
    [
        # As they are published for ImageNet, and with CIFAR's stem.
        (18, 224, 1000, 11_689_512, 7),
        (50, 224, 1000, 25_557_032, 7),
        (18, 32, 10, 11_173_962, 4),
    ],
)
def test_resnets_have_their_papers_shape(
    layers: Any, size: int, classes: int, parameters: int, last: int
) -> None:
    with torch.device("meta"):
        network = convolutional.resnet(3, classes, size, layers=layers)
        pixels = torch.empty(2, 3, size, size)
        assert nn.Sequential(network.stem, *network.blocks)(pixels).shape[2:] == (last, last)
        assert network(pixels).shape == (2, classes)
    assert sum(param.numel() for param in network.parameters()) == parameters


def averaged() -> tuple[list[float], list[float]]:
    module = nn.BatchNorm2d(2)
    module.running_mean.fill_(dist.get_rank())
    module.running_var.fill_(10.0 * dist.get_rank())
    convolutional.average_statistics(nn.Sequential(module))
    return module.running_mean.tolist(), module.running_var.tolist()


def test_ranks_average_what_batches_were_like(ranks: Pools) -> None:
    assert ranks.run(2, averaged) == [([0.5, 0.5], [5.0, 5.0])] * 2
