"""A strategy of each engine trains a network of images as FSDP2 does."""

from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from baselines import registry
from baselines.optimizers import SGD, Decay
from baselines.strategy import load
from experiments.records.workload import Convolutional, Images
from experiments.worker import images, models
from tests.baselines.jobs import job
from tests.experiments.cells import cell
from tests.fcdp.training import topology_of
from tests.ranks import Pools

MODEL = Convolutional(name="cnn", family="convolutional", layers=4, width=4)
STEPS = 4


def made_up() -> images.Source:
    """Images whose mean tells their class."""
    drawn = torch.Generator().manual_seed(0)
    classes = torch.arange(64) % 4
    pixels = torch.rand(64, 1, 8, 8, generator=drawn) + classes.view(-1, 1, 1, 1)
    both = TensorDataset(pixels, classes)
    return images.Source((1, 8, 8), 4, lambda *_: (both, both))


def trained(strategy: str) -> tuple[list[float], list[float]]:
    """This rank's losses, and what is measured before and after; two nodes of two ranks."""
    images.SOURCES["digits"] = made_up()
    topology = topology_of(2, 2)
    chosen = SGD(kind="sgd", weight_decay=1e-3, decay=Decay(every=2, by=0.5))
    image_cell = cell(
        strategy,
        model=MODEL,
        data=Images(images="digits"),
        sequence_length=1,
        micro_batch=4,
        held_out=8,
        optimizer=chosen,
    )
    model, blocks = models.build(image_cell)
    workload = images.ImageWorkload(image_cell, Images(images="digits"), topology.rank, 4)
    image_job = job(
        topology,
        blocks,
        learning_rate=0.05,
        settings=image_cell.settings,
        optimizer=chosen,
        loss=workload.loss,
        measure=workload.measure,
    )
    trainable = load(strategy)(model, image_job)
    (first, _) = workload.held_out()
    before = trainable.evaluate(first).tolist()
    losses = [trainable.step([batch]).item() for batch in islice(workload.batches(), STEPS)]
    return losses, [*before, *trainable.evaluate(first).tolist()]


def test_losses_and_accuracy_are_fsdp2s(ranks: Pools) -> None:
    """Where a strategy has numerics of its own, its first step begins where all others' does."""
    expected = ranks.run(4, trained, "fsdp2")
    for strategy in ("fcdp", "ddp", "cyclic", "co2"):
        actual = ranks.run(4, trained, strategy)
        for (mine, measured), (losses, reference) in zip(actual, expected, strict=True):
            if registry.find(strategy).numerics == "exact":
                assert mine == pytest.approx(losses, rel=1e-5)
                assert measured == pytest.approx(reference, rel=1e-5)
            assert mine[0] == pytest.approx(losses[0], rel=1e-5)
            assert all(torch.tensor([*mine, *measured]).isfinite())
            assert 0 <= measured[3] <= 1
    assert len({tuple(losses) for losses, _ in expected}) == 4, "ranks have images of their own"
    ((_, (before, _, after, _)), *_) = expected
    assert abs(after - before) > 0.01, "the steps did nothing"
