"""Rates of GPUs from published runs: three shares of each GPU's data sheet, and two numbers of all.

``results/compute/measured.csv`` has rows of the tables of mosaicml/llm-foundry,
scripts/train/benchmarking: GPU, shape, length, batch, checkpointing, tokens per second and GPU.

The time of a token is linear in the inverse shares, in the passes of exchanged bytes and in what is
lost with scale. Relative errors are minimised, large ones counted less: some published runs are
slower than their neighbours by a quarter, without a reason that the tables give. The fit's record
has constants with intervals, errors on rows that were left out, and predictions. A GPU has the
rates of its own rows, or those of the GPU whose architecture is nearest.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from simulation.emulated import INTERVAL, Constant, bootstrap, not_negative
from simulation.files import Strict, problem
from simulation.hardware import Gpu, Hardware, Rates, Work, card, cluster, scale
from simulation.prediction import predict
from simulation.step.schedule import ADAM_BYTES
from simulation.transformer import Transformer
from simulation.workload import Workload, token_work

ROWS = Path(__file__).parents[1] / "results" / "compute" / "measured.csv"
#: Words of the tokenizer that its models are made for.
_VOCABULARY = 50_368
_GPUS_PER_NODE = 8
#: Rounds in which weights are found, and the error below which all count alike.
_ROUNDS, _SMALL = 20, 0.01
#: Exchanges of all parameters per micro-batch: gathers of forward and backward, one reduction.
_EXCHANGES = 3
PARTS = ("products", "attention", "bytes")
RECORD = Path(__file__).parents[1] / "results" / "compute" / "fit.json"
SOURCE = "mosaicml/llm-foundry, scripts/train/benchmarking"
#: Sizes of the half that is fitted where the other half is predicted, and the other way round.
HALF = frozenset({"70b", "3b", "760m", "125m"})
#: Micro-batches of a step that are simulated; those of a row's step are alike.
_SIMULATED = 3
#: Least share of the prediction that is thought possible of cards without a rack's power: they do
#: not hold the clocks of their data sheets in matrix products. Ours.
_LEAST_OF_CARDS = 0.55


class Row(Strict):
    """A line of the file."""

    gpu: str
    model: str
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    gpus: int = Field(ge=1)
    sequence_length: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    precision: str
    sharding: str
    activation_checkpointing: bool
    activation_cpu_offload: bool
    mfu_percent: float
    hfu_percent: float
    tokens_per_s_per_gpu: float = Field(gt=0)

    @property
    def bf16(self) -> bool:
        """Whether its matrix products are in bf16, as all that is predicted here."""
        return "bf16" in self.precision


@dataclass(frozen=True)
class Run:
    """A row as the simulator sees it."""

    row: Row
    workload: Workload
    #: The cluster by its data sheets.
    hardware: Hardware


def read_rows(path: Path = ROWS) -> list[Row]:
    """Read a file of rows. Raises ``ValueError`` with the file and the line."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = []
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(Row.model_validate(line))
            except ValidationError as error:
                raise ValueError(f"{path}:{number}: {problem(error)}") from error
    return rows


def run_of(row: Row) -> Run:
    """The row's workload and cluster; fused kernels, FSDP over all GPUs.

    Raises ``ValueError`` for a GPU that is not known, and for GPUs that fill no nodes of eight.
    """
    nodes, rest = divmod(row.gpus, min(row.gpus, _GPUS_PER_NODE))
    if rest:
        raise ValueError(f"gpus = {row.gpus}: must be a multiple of {_GPUS_PER_NODE} above it")
    model = Transformer(
        name=row.model,
        family="gpt2",
        layers=row.layers,
        width=row.width,
        heads=row.heads,
        vocabulary=_VOCABULARY,
        mlp_width=4 * row.width,
        key_value_heads=row.heads,
        tied=True,
    )
    workload = Workload(
        strategy="fsdp2",
        model=model,
        sequence_length=row.sequence_length,
        micro_batch=row.micro_batch,
        accumulation=max(1, row.global_batch // (row.gpus * row.micro_batch)),
        recomputed=float(row.activation_checkpointing),
        kernels="fused",
    )
    hardware = cluster(
        row.gpu,
        nodes=nodes,
        ranks_per_node=min(row.gpus, _GPUS_PER_NODE),
        inter_bits_per_s=card(row.gpu).node_bits_per_s,
    )
    return Run(row, workload, hardware)


@dataclass(frozen=True)
class Shares:
    """Shares of a GPU's data sheet that are reached: of the peak, and of the memory's rate."""

    products: float
    #: Of the peak, by the operations of causal attention.
    attention: float
    bytes: float


@dataclass(frozen=True)
class Fitted:
    """What was fitted: shares by GPU, and what all GPUs have in common."""

    shares: Mapping[str, Shares]
    #: Passes through memory, at its full rate, of each byte that is gathered or reduced.
    exchange_passes: float
    lost_with_scale: float

    def rates(self, device: Gpu, measured: str) -> Rates:
        """The rates of ``device`` by the shares of the GPU that was ``measured``."""
        shares = self.shares[measured]
        nbytes = shares.bytes * device.memory_bytes_per_s
        return Rates(
            products_per_s=shares.products * device.peak_flops,
            attention_per_s=shares.attention * device.peak_flops,
            bytes_per_s=nbytes,
            copied_bytes_per_s=nbytes,
            exchanged_bytes_per_s=_rate(device, self.exchange_passes),
            lost_with_scale=self.lost_with_scale,
            basis="fitted" if measured == device.name else "nearest architecture",
            measured_on=measured,
        )

    def numbers(self) -> dict[str, float]:
        """All constants by name, such as ``h100-sxm products``."""
        found = {
            f"{gpu} {part}": float(getattr(shares, part))
            for gpu, shares in self.shares.items()
            for part in PARTS
        }
        found["exchange passes"] = self.exchange_passes
        found["lost with scale"] = self.lost_with_scale
        return found


def fit(runs: Sequence[Run]) -> Fitted:
    """Fit the constants. Raises ``ValueError`` where there are too few runs for them.

    What a GPU's rows do not tell apart, as few do that are of one size, is the others' mean.
    """
    gpus = sorted({run.row.gpu for run in runs})
    count = len(PARTS) * len(gpus) + 2
    if len(runs) < count:
        raise ValueError(f"rows: {len(runs)} were given, {count} constants need as many at least")
    features = np.array([_features(run, gpus) for run in runs])
    target = np.array([1 - _optimizer_share(run) for run in runs])
    #: How constants follow from those that are fitted.
    mean = np.eye(count)
    while True:
        found = mean @ np.array(_robust(features @ mean, target))
        untold = [at for at in range(count - 2) if found[at] <= 0]
        if not untold:
            break
        for at in untold:
            others = [
                other
                for other in range(at % len(PARTS), count - 2, len(PARTS))
                if other not in untold and mean[other, other]
            ]
            if not others:
                gpu, part = gpus[at // len(PARTS)], PARTS[at % len(PARTS)]
                raise ValueError(f"rows of {gpu}: do not tell {part} from the rest")
            mean[at] = 0
            mean[at, others] = 1 / len(others)
    passes, lost = (float(value) for value in found[-2:])
    shares = {
        gpu: Shares(*(1 / float(value) for value in found[len(PARTS) * index :][: len(PARTS)]))
        for index, gpu in enumerate(gpus)
    }
    return Fitted(shares, passes, lost)


def _rate(device: Gpu, passes: float) -> float:
    return device.memory_bytes_per_s / passes if passes else float("inf")


def _features(run: Run, gpus: Sequence[str]) -> list[float]:
    """Each constant's factor in the measured time, relative to it."""
    device, work, row = run.hardware.device, token_work(run.workload), run.row
    measured = 1 / row.tokens_per_s_per_gpu
    own = [
        work.products / device.peak_flops,
        work.attention / device.peak_flops,
        work.nbytes / device.memory_bytes_per_s,
    ]
    columns = [0.0] * (len(PARTS) * len(gpus))
    at = len(PARTS) * gpus.index(row.gpu)
    columns[at : at + len(PARTS)] = [value / measured for value in own]
    element, tokens = run.workload.element_bytes, run.workload.tokens
    exchanged = _EXCHANGES * element * run.workload.parameters / tokens
    columns.append(exchanged / device.memory_bytes_per_s / measured)
    columns.append(scale(run.hardware.nodes))
    return columns


def _optimizer_share(run: Run) -> float:
    """Share of the measured time that the optimizer's step takes by the data sheet."""
    workload, world = run.workload, run.hardware.world_size
    seconds = ADAM_BYTES * workload.trained / world / run.hardware.device.memory_bytes_per_s
    tokens = workload.tokens * workload.accumulation
    return seconds / tokens * run.row.tokens_per_s_per_gpu


def _robust(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Fit with weights that fall with the error, which is close to the least sum of errors."""
    weights = np.ones(len(target))
    for _ in range(_ROUNDS):
        found = not_negative(features * weights[:, None], target * weights)
        errors = np.abs(features @ np.array(found) - target)
        weights = 1 / np.sqrt(np.maximum(errors, _SMALL))
    return found


class Check(Strict):
    """Relative errors of tokens per second, of rows that the fit had not seen, or of all."""

    what: str
    rows: int
    #: Median of the absolute errors, what nine of ten are within, and the largest.
    median: float
    nine_of_ten: float
    worst: float
    #: Ratios of measured to predicted between which nine of ten lie.
    lowest: float
    highest: float


class Predicted(Strict):
    """A row's measured and predicted tokens per second and GPU."""

    row: Row
    fitted: float
    #: By the fit to the half that does not have the row's size.
    held_out: float


class ComputeRecord(Strict):
    """All that was fitted, and how well it predicts."""

    evidence: Literal["simulated"] = "simulated"
    source: str = SOURCE
    constants: list[Constant]
    checks: list[Check]
    predictions: list[Predicted]
    commit: str | None
    started_at: str

    def fitted(self) -> Fitted:
        """The constants as the fit has them."""
        values = {constant.name: constant.value for constant in self.constants}
        passes, lost = values.pop("exchange passes"), values.pop("lost with scale")
        by_gpu: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            gpu, part = name.split()
            by_gpu.setdefault(gpu, {})[part] = value
        shares = {gpu: Shares(**parts) for gpu, parts in by_gpu.items()}
        return Fitted(shares, passes, lost)

    def check(self, what: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.what == what)


def read(path: Path = RECORD) -> ComputeRecord:
    """Read the record. Raises ``ValueError`` for a file of another form."""
    return ComputeRecord.model_validate_json(path.read_bytes())


def settle(rows: Iterable[Row], commit: str | None) -> ComputeRecord:
    """Fit the bf16 rows, and check the fit; ``commit`` is the one that the record names."""
    runs = [run_of(row) for row in rows if row.bf16]
    whole = fit(runs)
    halves = _left_out(runs, lambda run: str(run.row.model in HALF))
    own = {id(run): tokens_per_gpu_s(run, whole) for run in runs}
    checks = [
        _check("all rows, fitted", runs, own),
        _check("the other half of the sizes", runs, halves),
        _check("each size", runs, _left_out(runs, lambda run: run.row.model)),
        _check("each length", runs, _left_out(runs, lambda run: str(run.row.sequence_length))),
        _check("each GPU", runs, _left_out(runs, lambda run: run.row.gpu)),
        _check("each architecture", runs, _left_out(runs, lambda run: run.row.gpu.split("-")[0])),
    ]
    return ComputeRecord(
        constants=_constants(runs, whole),
        checks=checks,
        predictions=[
            Predicted(row=run.row, fitted=own[id(run)], held_out=halves[id(run)]) for run in runs
        ],
        commit=commit,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def errors(rows: Iterable[Row], found: Fitted) -> Check:
    """How well the constants predict the rows in bf16. Raises ``ValueError`` where none is."""
    runs = [run_of(row) for row in rows if row.bf16]
    if not runs:
        raise ValueError("rows: hold none in bf16")
    return _check("given rows", runs, {id(run): tokens_per_gpu_s(run, found) for run in runs})


def tokens_per_gpu_s(run: Run, found: Fitted) -> float:
    """Tokens per second and GPU as the simulator predicts them."""
    measured_on = run.row.gpu if run.row.gpu in found.shares else min(found.shares)
    rates = found.rates(run.hardware.device, measured_on)
    hardware = replace(run.hardware, rates=rates)
    count = min(_SIMULATED, run.workload.accumulation)
    return predict(replace(run.workload, accumulation=count), hardware).tokens_per_s / run.row.gpus


def _left_out(runs: Sequence[Run], group: Callable[[Run], str]) -> dict[int, float]:
    """Each run's prediction by the fit to the runs of all other groups."""
    found = {}
    for name in dict.fromkeys(group(run) for run in runs):
        others = fit([run for run in runs if group(run) != name])
        for run in runs:
            if group(run) == name:
                found[id(run)] = tokens_per_gpu_s(run, others)
    return found


def _check(what: str, runs: Sequence[Run], predicted: Mapping[int, float]) -> Check:
    measured = {id(run): run.row.tokens_per_s_per_gpu for run in runs}
    ratios = [measured[key] / predicted[key] for key in measured]
    absolute = [abs(1 / ratio - 1) for ratio in ratios]
    lowest, highest = np.quantile(ratios, INTERVAL)
    return Check(
        what=what,
        rows=len(runs),
        median=round(median(absolute), 4),
        nine_of_ten=round(float(np.quantile(absolute, 0.9)), 4),
        worst=round(max(absolute), 4),
        lowest=round(float(lowest), 4),
        highest=round(float(highest), 4),
    )


def _constants(runs: Sequence[Run], whole: Fitted) -> list[Constant]:
    """The constants with intervals; a draw that lacks a GPU, or cannot be fitted, is left out."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row.gpu, run.row.model), []).append(run)
    names = list(whole.numbers())

    def solve(drawn: list[Run]) -> list[float] | None:
        try:
            numbers = fit(drawn).numbers()
        except ValueError:
            return None
        return [numbers[name] for name in names] if {*numbers} == {*names} else None

    lows, highs = bootstrap(list(groups.values()), solve)
    found = []
    for name, *numbers in zip(names, whole.numbers().values(), lows, highs, strict=True):
        value, low, high = (float(f"{number:.4g}") for number in numbers)
        found.append(Constant(name=name, value=value, low=low, high=high))
    return found


@cache
def record() -> ComputeRecord:
    """The committed fit."""
    return read()


def rates_of(device: Gpu) -> Rates:
    """The rates of the GPU, with their range and what they rest on; raises as ``card``."""
    known = record()
    rates = known.fitted().rates(device, card(device.name).like)
    if rates.basis == "fitted":
        check = known.check("each size")
        return replace(rates, lowest=check.lowest, highest=check.highest)
    check = known.check("each architecture")
    lowest = min(check.lowest, _LEAST_OF_CARDS) if device.link_is_pcie else check.lowest
    return replace(rates, lowest=lowest, highest=check.highest)


def by_block(device: Gpu, work: Work, seconds: float) -> Rates:
    """The GPU's rates where one transformer block, of this work, was measured.

    All parts are as much faster or slower than fitted; what is left to err is what runs of sizes
    that the fit had not seen do.
    """
    check = record().check("each size")
    return replace(
        rates_of(device).with_block(work, seconds), lowest=check.lowest, highest=check.highest
    )


def with_rates(hardware: Hardware) -> Hardware:
    """The cluster whose GPUs compute at fitted rates."""
    return replace(hardware, rates=rates_of(hardware.device))
