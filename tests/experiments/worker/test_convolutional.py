"""Networks that classify images: their shapes, and statistics that ranks share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.worker import convolutional
from tests.ranks import Pools


def elements(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_a_small_networks_blocks_are_alike() -> None:
    network = convolutional.small(1, 10, layers=3, width=4)
    assert [elements(block) for block in network.blocks] == [2 * (9 * 4 * 4 + 2 * 4)] * 3
    assert network(torch.rand(5, 1, 8, 8)).shape == (5, 10)


def test_an_image_does_not_depend_on_its_batch() -> None:
    network = convolutional.small(1, 10, layers=2, width=4)
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(network(images)[:1], network(images[:1]))


@pytest.mark.parametrize(
    ("layers", "size", "classes", "parameters", "blocks"),
    [
        # As they are published for ImageNet, and with CIFAR's stem.
        (18, 224, 1000, 11_689_512, 8),
        (50, 224, 1000, 25_557_032, 16),
        (18, 32, 10, 11_173_962, 8),
    ],
)
def test_resnets_have_their_papers_shape(
    layers: int, size: int, classes: int, parameters: int, blocks: int
) -> None:
    with torch.device("meta"):
        network = convolutional.resnet(3, classes, size, layers=layers)  # type: ignore[arg-type]
        hidden = network.stem(torch.empty(2, 3, size, size))
        assert hidden.shape == (2, 64, 56, 56) if size == 224 else (2, 64, 32, 32)
        for block in network.blocks:
            hidden = block(hidden)
        assert hidden.shape[2:] == ((7, 7) if size == 224 else (4, 4))
        assert network(torch.empty(2, 3, size, size)).shape == (2, classes)
    assert elements(network) == parameters
    assert len(network.blocks) == blocks


def averaged() -> tuple[list[float], list[float]]:
    module = nn.BatchNorm2d(2)
    assert module.running_mean is not None
    assert module.running_var is not None
    module.running_mean.fill_(dist.get_rank())
    module.running_var.fill_(10.0 * dist.get_rank())
    convolutional.average_statistics(nn.Sequential(module))
    return module.running_mean.tolist(), module.running_var.tolist()


def test_ranks_average_what_batches_were_like(ranks: Pools) -> None:
    assert ranks.run(2, averaged) == [([0.5, 0.5], [5.0, 5.0])] * 2
