"""Write baselines/configurations: DeepSpeed's files for the model of the matrix ``volume``.

Thresholds depend on the model, so that code computes them; these files show the result.
"""

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baselines import registry, strategy
from baselines.deepspeed import engine
from baselines.strategy import Job
from experiments.matrix import reader
from experiments.records.cell import Cell
from experiments.worker import models
from fcdp import Topology

FOLDER = Path(__file__).resolve().parents[1] / "baselines/configurations"


def configurations() -> dict[str, dict[str, Any]]:
    """Configurations by strategy, on CPUs, in full fine-tuning; DeepSpeed itself is not started."""
    cells = reader.read("volume").cells
    cell = next(each for each in cells if each.tuning == "full")
    names = [entry.name for entry in registry.STRATEGIES if entry.engine == "deepspeed"]
    return {name: _configuration(cell, name) for name in names}


def _configuration(cell: Cell, name: str) -> dict[str, Any]:
    with torch.device("meta"):
        model, blocks = models.build(cell)
    with (
        mock.patch.object(engine, "initialize") as initialize,
        mock.patch.object(engine, "build_operators"),
        mock.patch("deepspeed.ops.adam.DeepSpeedCPUAdam"),
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(tempfile, "gettempdir", return_value="TMPDIR"),
    ):
        strategy.load(name)(model, _job(cell, blocks))
    configuration: dict[str, Any] = initialize.call_args.args[2]
    return configuration


def _job(cell: Cell, blocks: Any) -> Job:
    spec = cell.cluster
    # No rank is started: there is no mesh, and no group.
    groups: Any = dict.fromkeys(field.name for field in fields(Topology) if field.kw_only)
    return Job(
        topology=Topology(spec.nodes, spec.ranks_per_node, 0, **groups),
        blocks=blocks,
        dtype=getattr(torch, cell.dtype),
        learning_rate=cell.learning_rate,
        micro_batch=cell.micro_batch,
        accumulation=cell.accumulation,
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, configuration in configurations().items():
        text = json.dumps(configuration, indent=2)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
