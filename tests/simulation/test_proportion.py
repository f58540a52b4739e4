"""The emulated matrix of the paper communicates for as long as the large cluster does."""

from collections.abc import Iterator

import pytest

from experiments.matrix import reader
from experiments.records.cell import Cell
from experiments.records.modelled import cluster_of, workload_of
from simulation.emulated import PAYLOAD_SHARE, emulated
from simulation.hardware import Hardware
from simulation.prediction import predict

#: As near as the host's constants are known: links were chosen by those of earlier records.
NEAR = 0.15


def zero3(name: str, model: str) -> Iterator[Cell]:
    """The matrix's cells of ZeRO-3, each once."""
    for cell in reader.read(name).cells:
        if (cell.strategy, cell.model.name, cell.repeat) == ("deepspeed-zero3", model, 0):
            yield cell


def ratio(cell: Cell) -> float:
    """Seconds that a node's link is busy per second of a rank's computation."""
    hardware = cluster_of(cell)
    sent, computed = sent_and_computed(cell, hardware)
    return sent / hardware.inter_bytes_per_s / computed


def sent_and_computed(cell: Cell, hardware: Hardware) -> tuple[float, float]:
    prediction = predict(workload_of(cell), hardware)
    return prediction.inter_node_bytes, prediction.timeline.busy_seconds()["compute"]


def test_links_are_those_of_the_same_ratio_which_the_comment_says() -> None:
    ratios = [ratio(cell) for cell in zero3("paper/bandwidth", "gpt-30b")]
    assert [float(f"{value:.2g}") for value in ratios] == [1.1, 4.4, 11, 110]
    for large, cell in zip(ratios, zero3("paper-emulated", "gpt2-4x768"), strict=True):
        assert ratio(cell) == pytest.approx(large, rel=NEAR)
        unlimited = emulated(cell.cluster.nodes, cell.cluster.ranks_per_node, None)
        sent, computed = sent_and_computed(cell, unlimited)
        link = 8 * sent / (large * computed) / PAYLOAD_SHARE
        assert cell.inter_bandwidth_bits_per_s == pytest.approx(link, rel=NEAR)


def test_full_fine_tuning_has_links_of_the_same_ratio() -> None:
    at_100_gbit = ratio(next(zero3("paper/full", "gpt-30b")))
    small = [ratio(cell) for cell in zero3("paper-emulated-full", "gpt2-4x768")]
    assert small == pytest.approx([at_100_gbit, 10 * at_100_gbit], rel=NEAR)
