"""Images that cells train on, and how the ranks share them.

An epoch is a shuffled order of all training images, which depends on the seed alone. The ranks take
its micro-batches in turn, so that every strategy trains on the same images in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.records.cell import Cell
from experiments.records.workload import Images, Origin, needed


class Examples(Protocol):
    """Images of (channels, height, width) floats with their classes, as data sets give them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]: ...


#: A reader of the images that a cell names: for training and for validation.
Read = Callable[[Images, Origin], tuple[Examples, Examples]]


@dataclass(frozen=True)
class Source:
    """A data set of images."""

    #: Channels, height and width of an image, and how many classes there are.
    shape: tuple[int, int, int]
    classes: int
    read: Read
    #: Processes per rank that read and transform images ahead of training; 0: it does so itself.
    readers: int = 0


class ImageWorkload:
    """Micro-batches of images: floats (images, channels · height · width + 1), the class last."""

    metrics: Sequence[str] = ("held_out_loss", "held_out_accuracy")

    def __init__(self, cell: Cell, spec: Images, rank: int, ranks: int) -> None:
        """Raises ``ValueError`` naming line and key where the images are not on this node."""
        self._source = SOURCES[spec.images]
        self._cell, self._rank, self._ranks = cell, rank, ranks
        self._training, self._validation = self._source.read(spec, cell.origin)
        least = ranks * cell.micro_batch
        if len(self._training) < least:
            raise ValueError(
                f"micro_batch = {cell.micro_batch}: {ranks} ranks take {least} images at a time, "
                f"and {spec.name} has {len(self._training)} to train on"
            )
        if cell.held_out > len(self._validation):
            raise ValueError(
                f"held_out = {cell.held_out}: allowed are 0 to {len(self._validation)}, the images "
                f"of {spec.name} that are not trained on"
            )

    def batches(self) -> Iterator[torch.Tensor]:
        cell = self._cell
        order = epochs(len(self._training), cell.micro_batch, self._ranks, cell.seed)
        mine = islice(order, self._rank, None, self._ranks)
        # Transforms draw from this one, whatever random numbers a strategy draws.
        generator = torch.Generator().manual_seed(cell.seed * 100_003 + self._rank)
        return iter(self._loader(self._training, mine, generator))

    def held_out(self) -> Iterator[torch.Tensor]:
        """Images spread evenly over the validation set."""
        number, size = self._cell.held_out, self._cell.micro_batch
        chosen = [index * len(self._validation) // number for index in range(number)]
        batches = [chosen[start : start + size] for start in range(0, number, size)]
        return iter(self._loader(self._validation, batches, torch.Generator()))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        pixels, classes = self._parts(batch)
        return nn.functional.cross_entropy(model(pixels).float(), classes)

    def measure(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        pixels, classes = self._parts(batch)
        scores = model(pixels).float()
        right = (scores.argmax(1) == classes).float().mean()
        return torch.stack((nn.functional.cross_entropy(scores, classes), right))

    def _loader(
        self, examples: Examples, batches: Any, generator: torch.Generator
    ) -> DataLoader[torch.Tensor]:
        return DataLoader(
            examples,  # type: ignore[arg-type]  # whatever has a length and items
            batch_sampler=batches,
            num_workers=self._source.readers,
            collate_fn=joined,
            generator=generator,
        )

    def _parts(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return batch[:, :-1].unflatten(1, self._source.shape), batch[:, -1].long()


def joined(examples: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor:
    """Images and their classes as one tensor; a float holds every class exactly."""
    pixels = torch.stack([image.flatten() for image, _ in examples])
    classes = torch.tensor([float(kind) for _, kind in examples])
    return torch.cat((pixels, classes[:, None]), dim=1)


def epochs(images: int, size: int, ranks: int, seed: int) -> Iterator[list[int]]:
    """Micro-batches of all ranks in turn; an epoch leaves out what does not fill one for each."""
    for epoch in count():
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        order = torch.randperm(images, generator=generator)[: images - images % (size * ranks)]
        yield from order.view(-1, size).tolist()


#: Number of scikit-learn's digits, its last, that are for validation: other people wrote them.
_VALIDATION_DIGITS = 360


def _digits(spec: Images, origin: Origin) -> tuple[Examples, Examples]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(f"{origin.key('data', 'images')}: {needed('images')}: {error}") from error
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float()[:, None] / 16
    classes = torch.from_numpy(digits.target)
    cut = len(pixels) - _VALIDATION_DIGITS
    return (TensorDataset(pixels[:cut], classes[:cut]), TensorDataset(pixels[cut:], classes[cut:]))


def _cifar_10(vision: Any, of: Any, folder: str) -> tuple[Examples, Examples]:
    normal = [of.ToTensor(), of.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    changed = of.Compose([of.RandomCrop(32, padding=4), of.RandomHorizontalFlip(), *normal])
    return (
        vision.CIFAR10(folder, train=True, transform=changed),
        vision.CIFAR10(folder, train=False, transform=of.Compose(normal)),
    )


def _imagenet(vision: Any, of: Any, folder: str) -> tuple[Examples, Examples]:
    """A folder ``train`` and a folder ``val``, each with a folder per class."""
    normal = [of.ToTensor(), of.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    changed = of.Compose([of.RandomResizedCrop(224), of.RandomHorizontalFlip(), *normal])
    cut = of.Compose([of.Resize(256), of.CenterCrop(224), *normal])
    return vision.ImageFolder(f"{folder}/train", changed), vision.ImageFolder(f"{folder}/val", cut)


def _by_torchvision(made: Callable[[Any, Any, str], tuple[Examples, Examples]]) -> Read:
    """A reader of what ``made`` builds from torchvision's data sets, transforms and a folder."""

    def read(spec: Images, origin: Origin) -> tuple[Examples, Examples]:
        try:
            from torchvision import datasets, transforms
        except Exception as error:  # a build for another torch fails in its own ways
            raise ValueError(
                f"{origin.key('data', 'images')}: {needed('images')}: {error}"
            ) from error
        assert spec.folder is not None, "the reader sees to it"
        where = origin.key("data", "folder")
        folder = origin.source(str(origin.path(spec.folder)), where)
        try:
            return made(datasets, transforms, folder)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{where}: {spec.folder} has no {spec.images} that torchvision reads: {error}"
            ) from error

    return read


SOURCES = {
    "digits": Source((1, 8, 8), 10, _digits),
    "cifar-10": Source((3, 32, 32), 10, _by_torchvision(_cifar_10), readers=2),
    "imagenet": Source((3, 224, 224), 1000, _by_torchvision(_imagenet), readers=8),
}
