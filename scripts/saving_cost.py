"""Cost of saving the reference model on a schedule, once in a hundred steps.

python -m scripts.saving_cost [ROUNDS]    measure and write the record, for scripts.readme

Each round trains 25 steps during a background save, for which it waits, and 25 without one, in
alternating order: the time that a save takes from later steps counts as well.
"""

import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fcdp
from experiments.clusters.emulated import EmulatedCluster
from experiments.matrix import reader
from experiments.records import provenance, select
from experiments.records.cell import Cell
from experiments.runner import runner
from experiments.worker.worker import _Training
from fcdp import Topology
from scripts import tables

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "results" / "saving" / "record.json"
#: Cell of matrix ``reference``: all parameters trained, on a link that is not limited.
CELL = "fcdp-full-gpt2-4x256-unshaped-k1"
ENTRY = "scripts.saving_cost:train"
#: Steps of a half, in which a save always ends; steps from one save to the next; rounds.
STEPS, EACH, ROUNDS = 25, 100, 32


def train(cell_file: str, output: str, rounds: str) -> None:
    """Train on this rank; rank 0 writes the seconds of each round's halves."""
    cell = Cell.model_validate_json(Path(cell_file).read_text(encoding="utf-8"))
    training = _Training(cell, Topology.from_env(), Path(output))
    training._train(20)
    taken: dict[str, list[float]] = {"saved": [], "plain": [], "held_up": []}
    for at in range(int(rounds)):
        for half in ("saved", "plain")[:: 1 if at % 2 else -1]:
            dist.barrier()
            begun = time.perf_counter()
            if half == "saved":
                model, optimizer = training.model, training._optimizer
                saving = fcdp.save(model, optimizer, Path(output) / "saved", asynchronous=True)
                taken["held_up"].append(time.perf_counter() - begun)
            training._train(STEPS)
            if half == "saved":
                saving.result()
            taken[half].append(time.perf_counter() - begun)
    if training.topology.rank == 0:
        size = sum(file.stat().st_size for file in Path(output, "saved").rglob("*"))
        written = json.dumps({**taken, "bytes": size})
        Path(output, "taken.json").write_text(written, encoding="utf-8")
    dist.destroy_process_group()


def measured(rounds: int) -> dict[str, Any]:
    """The record of so many rounds on an emulated cluster."""
    (cell,) = select.chosen(reader.read("reference").cells, CELL)
    cell = cell.model_copy(update={"timeout_s": 7200})
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(cell.cluster) as cluster:
        runner.write(cell, Path(folder))
        outcome, _ = runner.launch(cluster, cell, Path(folder), ENTRY, str(rounds))
        assert outcome.state == "ok", outcome.error
        taken = json.loads(Path(folder, "taken.json").read_text(encoding="utf-8"))
    return {
        "command": "python -m scripts.saving_cost",
        "date": date.today().isoformat(),
        "machine": provenance.gather().hardware["cpu"],
        "torch": torch.__version__,
        "cell": cell.id,
        "steps": STEPS,
        "each": EACH,
        **taken,
    }


if __name__ == "__main__":
    record = measured(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(tables.saving(record))
