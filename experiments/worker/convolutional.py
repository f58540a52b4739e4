"""Residual networks that classify images."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn

#: A constructor of a normalisation of so many channels.
Norm = Callable[[int], nn.Module]
#: Inputs, outputs, size and stride of a convolution.
Shape = tuple[int, int, int, int]


class Residual(nn.Module):
    """Normalised convolutions beside a shortcut, which is the identity where shapes allow it."""

    def __init__(self, convolutions: Sequence[Shape], norm: Norm) -> None:
        super().__init__()
        inside: list[nn.Module] = []
        for shape in convolutions:
            inside += [_convolution(*shape), norm(shape[1]), nn.ReLU()]
        self.inside = nn.Sequential(*inside[:-1])  # the last rectifier takes the sum
        inputs, outputs = convolutions[0][0], convolutions[-1][1]
        stride = max(shape[3] for shape in convolutions)
        self.past: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            self.past = nn.Sequential(_convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inside(images) + self.past(images))


class Network(nn.Module):
    """A stem, residual blocks, and scores of the classes from their mean over the image."""

    def __init__(self, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Linear) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # In the dtype of the gathered weights: DeepSpeed's engine leaves its inputs in float32.
        hidden = self.stem(images.to(self.head.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden.mean((2, 3)))
        return scores


def small(channels: int, classes: int, *, layers: int, width: int) -> Network:
    """A network of equal blocks, so that stages of them cost alike.

    Each channel of each image is normalised by itself: what else is in the batch does not matter.
    """

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(channels, channels)

    stem = nn.Sequential(_convolution(channels, width, 3), norm(width), nn.ReLU())
    blocks = [Residual(_basic(width, width, 1), norm) for _ in range(layers)]
    return Network(stem, blocks, nn.Linear(width, classes))


#: Widths of a ResNet's four groups of blocks, before what a bottleneck multiplies them by.
_WIDTHS = (64, 128, 256, 512)
#: Blocks of each group.
_DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def resnet(channels: int, classes: int, size: int, *, layers: Literal[18, 50]) -> Network:
    """ResNet-18 or -50; images below 64 pixels keep their size in the stem, as CIFAR's do."""
    norm = nn.BatchNorm2d
    stem = [_convolution(channels, 64, 3), norm(64), nn.ReLU()]
    if size >= 64:
        stem = [_convolution(channels, 64, 7, 2), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs, shape = [], 64, _basic if layers == 18 else _bottleneck
    for group, (width, depth) in enumerate(zip(_WIDTHS, _DEPTHS[layers], strict=True)):
        for index in range(depth):
            stride = 2 if group and not index else 1
            convolutions = shape(inputs, width, stride)
            blocks.append(Residual(convolutions, norm))
            inputs = convolutions[-1][1]
    network = Network(nn.Sequential(*stem), blocks, nn.Linear(inputs, classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def average_statistics(model: nn.Module) -> None:
    """Give batch normalisation the ranks' mean statistics: each has seen batches of its own."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for statistic in (module.running_mean, module.running_var):
                assert statistic is not None, "it is made with statistics"
                dist.all_reduce(statistic)
                statistic /= dist.get_world_size()


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def _basic(inputs: int, width: int, stride: int) -> list[Shape]:
    return [(inputs, width, 3, stride), (width, width, 3, 1)]


def _bottleneck(inputs: int, width: int, stride: int) -> list[Shape]:
    return [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
