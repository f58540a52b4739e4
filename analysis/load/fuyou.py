"""Fuyou's step on the machine of its paper, by the cost model that the strategy itself has.

The published numbers are teraflops per second of the whole machine, by model, batch, SSDs and GPUs
(``results/fuyou-published``, from the authors' repository). All constants are stated here but one,
which is fitted: the parameters that AdamW on the CPU steps per second.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

from baselines.fuyou import cost
from baselines.fuyou.cost import Item, Rates, Work
from simulation.files import Strict, rows_of, validated

#: The points, relative to the folder of results.
FILE = "fuyou-published/points.csv"
PUBLISHED = Path(__file__).parents[2] / "results" / FILE
#: Layers and width.
MODELS = {"13B": (40, 5120), "70B": (80, 8192), "175B": (96, 12288)}
SEQUENCE = 1024
HALF = 2
#: RTX 4090, float16 products summed in float32: the data sheet's peak.
GPU_FLOPS = 165.2e12
#: PCIe 4.0 × 16, as in the authors' own estimate of what to swap.
LINK = 20e9
#: D7-P5510 of 3.84 TB, the data sheet's sequential reads and writes.
SSD_READ, SSD_WRITE = 6.5e9, 3.4e9
#: Host memory, and its part that buffers state and gradients in transit.
DRAM, TAKEN = 768e9, 100e9
#: Output and inner dimensions, in widths, of a layer's four matrix products: qkv, projection, and
#: the MLP's two.
_OUTPUTS = ((3, 1), (1, 1), (4, 1), (1, 4))
#: Rates that are tried for the fitted constant, parameters per second.
_TRIED = [1e8 * 1.02**step for step in range(200)]


class Point(Strict):
    """One published number, and its setting."""

    table: str
    model: str
    gpus: int
    ssds: int
    batch: int
    tflops: float

    @property
    def parameters(self) -> float:
        """Parameters of the layers alone: the benchmark has no embedding or head worth counting."""
        layers, width = MODELS[self.model]
        return 12.0 * layers * width**2


def published(file: Path = PUBLISHED) -> list[Point]:
    """The points of the authors' table."""
    return [validated(Point, values, where) for where, values in rows_of(file)]


@cache  # of all rates of the optimizer that are tried
def work_of(point: Point) -> Work:
    """A step of one GPU, which has its share of the batch; state is shared by all GPUs."""
    layers, width = MODELS[point.model]
    tokens = point.batch / point.gpus * SEQUENCE
    unit = tokens * width * HALF
    # Products with weights, and attention's two, neither of them halved by the causal mask.
    flops = layers * tokens * (24 * width**2 + 4 * SEQUENCE * width)
    items = [
        Item(out * unit, 2 * tokens * out * wide * width**2)
        for _ in range(layers)
        for out, wide in _OUTPUTS
    ]
    parameters = point.parameters
    return Work(
        flops=flops,
        recomputed=flops,
        parameters=HALF * parameters,
        gradients=HALF * parameters,
        state_read=12 * parameters,
        state_written=14 * parameters,
        # Inputs of a layer's two halves.
        between=2 * layers * unit,
        items=tuple(items),
    )


def rates_of(point: Point, adam: float) -> Rates:
    """The machine of a point; ``adam``: parameters that the CPU steps per second."""
    return Rates(
        flops=GPU_FLOPS,
        link=LINK,
        read=point.ssds * SSD_READ,
        write=point.ssds * SSD_WRITE,
        adam=point.parameters / adam,
        dram=(DRAM - TAKEN) / point.gpus,
    )


def predicted(point: Point, adam: float) -> float:
    """Teraflops per second of all GPUs: three forwards' operations in a step's time."""
    work, rates = work_of(point), rates_of(point, adam)
    step = min(seconds for _, seconds in cost.curve(work, rates))
    return 3 * work.flops * point.gpus / step / 1e12


def errors(points: Sequence[Point], adam: float) -> list[float]:
    """The error of each prediction, as a share of the published number."""
    return [predicted(point, adam) / point.tflops - 1 for point in points]


def fitted(points: Sequence[Point]) -> float:
    """Parameters per second of the CPU's AdamW with the least median error over these points."""
    return min(_TRIED, key=lambda rate: median(map(abs, errors(points, rate))))
