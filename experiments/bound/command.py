"""``python -m experiments bound``: how much of a GPU memory and bandwidth let FSDP use."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from experiments.bound.records import BoundRecord, Gains, Point
    from experiments.costs.fsdp_bound import Cluster, Shape

#: Sizes as the paper names them: billions of parameters, layers, width, GPUs.
_MODELS = (
    (1.3, 24, 2048, 8),
    (7, 32, 4096, 8),
    (13, 40, 5120, 8),
    (66, 80, 8192, 64),
    (175, 96, 12288, 512),
    (310, 96, 16384, 512),
)
_GPU = "a100-40gb"
_BITS_PER_S = (100e9, 200e9)
_SEQUENCE_LENGTH, _LONGER = 2048, 4


def bound(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where bound.jsonl goes.")] = Path(
        "runs/bound"
    ),
) -> None:
    """Bound FSDP's utilisation by free memory × bandwidth / peak rate, for 1.3B to 310B on A100s.

    The closed form of "Memory and Bandwidth are All You Need for FSDP"; nothing is run.
    """
    from experiments import provenance, records

    commit = provenance.gather().commit
    found = [_settle(point, commit) for point in _points()]
    file = output / "bound.jsonl"
    try:
        file.unlink(missing_ok=True)
        for record in found:
            records.append(record, file)
    except OSError as error:
        terminal.stop(f"{file}: {error.strerror}")
    console = terminal.console()
    console.print(_table(found))
    terminal.say(console, "records", file)


def _points() -> list[Point]:
    from experiments.bound.records import Point
    from experiments.costs.hardware import gpu

    device = gpu(_GPU)
    return [
        Point(
            model=f"{billions:g}B",
            named_parameters=billions * 1e9,
            layers=layers,
            width=width,
            gpus=gpus,
            memory_bytes=device.memory_bytes,
            bandwidth_bits_per_s=bits,
            peak_flops=device.peak_flops,
            sequence_length=_SEQUENCE_LENGTH,
        )
        for billions, layers, width, gpus in _MODELS
        for bits in _BITS_PER_S
    ]


def _settle(point: Point, commit: str | None) -> BoundRecord:
    from experiments.bound.records import BoundRecord
    from experiments.costs import fsdp_bound as model

    shape = model.Shape(layers=point.layers, width=point.width)
    cluster = model.Cluster(
        gpus=point.gpus,
        memory_bytes=point.memory_bytes,
        bandwidth_bytes_per_s=point.bandwidth_bits_per_s / 8,
        peak_flops=point.peak_flops,
    )
    length = point.sequence_length
    best = model.grid_search(shape, cluster, length).mfu
    assert best is not None, "all of the paper's models fit"
    required = model.required_bandwidth_bytes_per_s(shape, cluster, length, target=1.0)
    return BoundRecord(
        point=point,
        parameters=shape.parameters,
        free_bytes=model.free_bytes(shape, cluster),
        tokens=model.token_capacity(shape, cluster),
        hfu_bound=model.hfu_bound(shape, cluster, length),
        required_bits_per_s=8 * required,
        best_mfu=best.estimate.mfu,
        gains=_gains(shape, cluster, length),
        commit=commit,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _gains(shape: Shape, cluster: Cluster, length: int) -> Gains:
    from dataclasses import replace

    from experiments.bound.records import Gains
    from experiments.costs import fsdp_bound as model

    bandwidth, memory = cluster.bandwidth_bytes_per_s, cluster.memory_bytes
    faster = replace(cluster, bandwidth_bytes_per_s=2 * bandwidth)
    larger = replace(cluster, memory_bytes=memory + model.free_bytes(shape, cluster))
    usual = model.hfu_bound(shape, cluster, length)
    steps = [model.estimate(shape, cluster, tokens) for tokens in (length, _LONGER * length)]
    short, long = (step.tokens_per_gpu_s for step in steps if step is not None)
    return Gains(
        twice_bandwidth=model.hfu_bound(shape, faster, length) / usual,
        twice_free_memory=model.hfu_bound(shape, larger, length) / usual,
        longer_sequences=model.hfu_bound(shape, cluster, _LONGER * length) / usual,
        longer_sequences_tokens_per_s=long / short,
    )


def _table(found: Sequence[BoundRecord]) -> Table:
    from rich.table import Table

    table = Table("model", box=None)
    table.title = f"{_GPU}, {_SEQUENCE_LENGTH} tokens a sequence: closed form, simulated"
    for column in ("GPUs", "Gbit/s", "free GB", "tokens", "bound", "needs Gbit/s", "best MFU"):
        table.add_column(column, justify="right")
    for record in found:
        point = record.point
        table.add_row(
            point.model,
            f"{point.gpus}",
            f"{point.bandwidth_bits_per_s / 1e9:g}",
            f"{record.free_bytes / 1e9:.1f}",
            f"{record.tokens:,.0f}",
            f"{record.hfu_bound:.3g}",
            f"{record.required_bits_per_s / 1e9:.3g}",
            f"{record.best_mfu:.1%}",
        )
    return table
