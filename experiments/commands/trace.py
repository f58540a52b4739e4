"""``python -m experiments trace``: one simulated step, task by task, as a Chrome trace."""

import json
from pathlib import Path
from typing import Annotated

import typer

from experiments import terminal
from experiments.clusters.interface import ClusterError
from experiments.clusters.simulated import SimulatedCluster
from experiments.matrix import reader
from experiments.records import select
from experiments.records.modelled import cluster_of, workload_of
from simulation.prediction import chrome_trace, predict


def trace(
    matrix: Annotated[
        str, typer.Argument(metavar="MATRIX", help="A name in experiments/matrices, or a path.")
    ],
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="The cell whose id contains or matches this.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the trace goes.")] = Path(
        "trace.json"
    ),
) -> None:
    """Simulate one cell of a matrix and write its step for chrome://tracing or ui.perfetto.dev.

    It has one row per stream; tasks that follow one another without a gap are of category
    `critical`. An emulated cell is simulated as `run MATRIX --cluster simulated` does.
    """
    with terminal.stopping(ClusterError):
        expanded = reader.read(matrix, simulated=True)
        chosen = select.chosen(expanded.cells, only)
        if len(chosen) > 1:
            examples = ", ".join(cell.id for cell in chosen[:3])
            raise ValueError(f"--only: {len(chosen)} cells match {only!r}, give one: {examples}, …")
        SimulatedCluster(expanded.cluster)  # or an error that says why it cannot be
        prediction = predict(workload_of(chosen[0]), cluster_of(chosen[0]))
        terminal.check_writable("--output", output)
        written = chrome_trace(prediction)
        written["otherData"]["cell"] = chosen[0].id
        output.write_text(json.dumps(written) + "\n", encoding="utf-8")
    short = "" if prediction.error is None else f" if there were the memory: {prediction.error}"
    line = f"{chosen[0].id}: {prediction.step_seconds:.3g} s, in use most: {prediction.bottleneck}"
    terminal.say_as_it_is(f"{line}; simulated{short}")
    terminal.say("trace", output)
