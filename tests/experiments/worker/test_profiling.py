"""A profiled step leaves a trace per rank, and a summary of what was exchanged."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import fcdp
from experiments.worker.worker import FOLDER, SUMMARY, _Training
from tests.fcdp.training import Run, Settings
from tests.ranks import Pools


def profiled(output: str) -> dict[str, dict[str, int]]:
    """Profile the second step of a small model; returns this rank's bytes of it."""
    run = Run(Settings(2, 2))
    ledger = fcdp.ledger(run.model)
    taken: list[dict[str, dict[str, int]]] = []

    def take() -> dict[str, dict[str, int]]:
        taken.append(ledger.snapshot())
        ledger.reset()
        return taken[-1]

    run.step()
    sent = iter([(1_000_000,), (3_500_000,)])
    training: Any = SimpleNamespace(
        output=Path(output),
        topology=run.topology,
        trainable=SimpleNamespace(take_ledger=take),
        _device=torch.device("cpu"),
        _batches=lambda: (),
        _step=lambda batches: torch.tensor(run.step()),
        _egress=lambda: next(sent),
    )
    _Training.profile_step(training)
    return taken[-1]


def test_each_rank_writes_a_trace_and_rank_0_a_summary(ranks: Pools, tmp_path: Path) -> None:
    ledger = ranks.run(4, profiled, str(tmp_path))[0]
    folder = tmp_path / FOLDER
    traces = [f"rank{rank}.json.gz" for rank in range(4)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([SUMMARY, *traces])
    for trace in traces:
        events = json.loads(gzip.decompress((folder / trace).read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert {"fcdp::gather_inter blocks.0", "fcdp::reduce_inter blocks.1"} <= names
    lines = (folder / SUMMARY).read_text().splitlines()
    rows = {cells[1].strip(): cells[2:] for line in lines if len(cells := line.split("|")) > 4}
    # Three units, each gathered across nodes once and inside the node in forward and backward,
    # but for the root, which stays gathered.
    assert float(rows["fcdp::gather_inter"][0]) == 3
    assert float(rows["fcdp::gather_intra"][0]) == 5
    assert float(rows["fcdp::reduce_inter"][0]) == 3
    assert float(rows["fcdp::gather_inter"][1]) <= float(rows["fcdp::gather_inter"][2])
    assert "Node 0 sent 2.500 MB to other nodes, by the kernel's counters." in lines
    crossed = ledger["inter_node"]["forward"] / 1e6
    assert f"| inter node | forward | {crossed:.3f} |" in lines
