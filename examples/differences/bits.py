"""Bits that gathers and reductions take, beside the entropy of what has changed in the same steps.

python -m examples.differences.bits    measure, and write the record; scripts.readme the table

Trains the model of ``pretrain``, and one of twice its width, at the rates of matrix.yaml, on
emulated nodes whose links have no limit; takes ten minutes of two cores. Bytes are the kernel's, of
a node's interface, from the model's forward to its end and from there to the step's end; all that
is around a message counts as well. The entropy is that of the words' differences, each taken alone,
over all parameters.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

from analysis import text
from examples.differences.pretrain import pretrain
from experiments.clusters.emulated import EmulatedCluster
from experiments.matrix import reader
from experiments.records import provenance
from experiments.records.cell import Cell, ClusterSpec
from experiments.records.workload import ConfiguredModel
from experiments.runner import runner
from experiments.worker.worker import _Training
from fcdp import Topology

MATRIX = Path(__file__).resolve().parent / "matrix.yaml"
RECORD = Path(__file__).resolve().parents[2] / "results" / "difference-bits" / "record.json"
ENTRY = "examples.differences.bits:train"
#: Warm-up steps, as Adam's first ones move weights by the whole rate, and measured steps.
WARM_UP, STEPS = 40, 15


def train(cell_file: str, output: str) -> None:
    """Train on this rank; rank 0 writes the bits of each step to ``bits.json``."""
    cell = Cell.model_validate_json(Path(cell_file).read_text(encoding="utf-8"))
    training = _Training(cell, Topology.from_env(), Path(output))
    model, nodes = training.trainable.model, cell.cluster.nodes
    #: Bytes that this node has sent when the model's forward began and when it ended.
    sent: list[int] = []
    model.register_forward_pre_hook(lambda *_: sent.append(training._egress()[0]), prepend=True)
    model.register_forward_hook(lambda *_: sent.append(training._egress()[0]))
    training._train(WARM_UP)
    bits: dict[str, list[float]] = {"gathers": [], "entropy": [], "reductions": []}
    reading = -training._egress()[0] + training._egress()[0]  # what a look at the counter sends
    crossing = (nodes - 1) / nodes * training.parameters
    before, differences = _words(model), None
    for _ in range(STEPS + 1):
        sent.clear()
        training._train(1)
        begun, gathered, ended = *sent, training._egress()[0]
        if differences is not None:  # of the step before, which this one's gathers have told
            bits["entropy"].append(_entropy(differences))
            bits["gathers"].append(8 * (gathered - begun - reading) / crossing)
            bits["reductions"].append(8 * (ended - gathered - reading) / crossing)
        after = _words(model)
        before, differences = after, (after - before) & 0xFFFF
    if training.topology.rank == 0:
        measurement = {"parameters": training.parameters, "bits": bits}
        Path(output, "bits.json").write_text(json.dumps(measurement), encoding="utf-8")
    dist.destroy_process_group()


def _words(model: torch.nn.Module) -> torch.Tensor:
    """This rank's shards as the bf16 words that are gathered, end to end."""
    shards: list[Any] = [*model.parameters()]
    return torch.cat(
        [shard.to_local().detach().bfloat16().view(torch.int16).int().flatten() for shard in shards]
    )


def _entropy(words: torch.Tensor) -> float:
    """Bits per word over all ranks, of words in 0 to 65,535."""
    counts = torch.bincount(words, minlength=2**16)
    dist.all_reduce(counts)
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log2()).sum().item()


def measured() -> dict[str, Any]:
    """The record: quartiles over steps of the bits per parameter, by model and learning rate."""
    exact = {"gather_codec": "delta(smallest)", "reduce_codec": "exact(always)", "accumulation": 1}
    matrix = reader.read(str(MATRIX), changes={**exact, "inter_bandwidth": "unshaped"})
    cells = matrix.running
    rows = []
    spec = cells[0].cluster
    assert isinstance(spec, ClusterSpec), "the matrix's nodes are emulated"
    with tempfile.TemporaryDirectory() as wide, EmulatedCluster(spec) as cluster:
        pretrain(width=512).save_pretrained(wide)
        configuration = json.loads(Path(wide, "config.json").read_text(encoding="utf-8"))
        model = ConfiguredModel(
            name="gpt2-4x512", config=wide, weights="pretrained", configuration=configuration
        )
        for cell in (*cells, *(cell.model_copy(update={"model": model}) for cell in cells)):
            with tempfile.TemporaryDirectory() as folder:
                timed = cell.model_copy(update={"timeout_s": 900})
                runner.write(timed, Path(folder))
                outcome, _ = runner.launch(cluster, timed, Path(folder), ENTRY)
                assert outcome.state == "ok", outcome.error
                measurement = json.loads(Path(folder, "bits.json").read_text(encoding="utf-8"))
            bits = {name: quantiles(values) for name, values in measurement.pop("bits").items()}
            rows.append({"learning_rate": cell.learning_rate, **measurement, **bits})
            print(*_row(rows[-1]), sep="  ", flush=True)
    return {
        "command": "python -m examples.differences.bits",
        "date": date.today().isoformat(),
        "machine": provenance.gather().hardware["cpu"],
        "torch": torch.__version__,
        "steps": STEPS,
        "rows": rows,
    }


def table(record: dict[str, Any]) -> str:
    """The table of the page, as Markdown."""
    made = (
        f"Made by `{record['command']}` on {record['date']}: bits per parameter that cross nodes, "
        f"by the kernel's counters, quartiles over {record['steps']} steps, beside the entropy of "
        "what has changed in them. At the lowest rate the smaller model's messages are of 4 kB, so "
        "that framing shows."
    )
    names = ("Entropy of differences", "Gathers", "over it", "Reductions in bf16")
    head = ("Parameters", "Learning rate", *names)
    return made + "\n\n" + text.table(head, [_row(row) for row in record["rows"]])


def _row(row: dict[str, Any]) -> Sequence[str]:
    def shown(name: str) -> str:
        return "{1:.3f} ({0:.3f}–{2:.3f})".format(*row[name])

    over = row["gathers"][1] / row["entropy"][1]
    model, rate = f"{row['parameters'] / 1e6:.1f} M", f"{row['learning_rate']:g}"
    return model, rate, shown("entropy"), shown("gathers"), f"{over:.2f}×", shown("reductions")


if __name__ == "__main__":
    made = measured()
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(table(made))
