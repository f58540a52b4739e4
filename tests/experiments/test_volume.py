"""The bytes that the project's first measurements found are found again, with this code.

They were taken on GPT-2 with 4 layers of width 256 and 3.45 M parameters in bfloat16, 2 × 2 ranks,
LoRA of rank 8 on c_attn, and a DeepSpeed that kept no gathered parameter alive. The matrix
``volume`` has that model, but what a user gets: adapters on c_proj too, and DeepSpeed's limits at
the shares that they have of 30B parameters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baselines import pins
from baselines.pins import Pin
from experiments.__main__ import PRELOADED
from experiments.clusters.emulated import EmulatedCluster
from experiments.clusters.privileges import missing_capabilities
from experiments.records import ClusterSpec, Tuning
from tests.experiments import cells
from tests.experiments.cells import NODES, RANKS_PER_NODE, cell, model_spec

pytestmark = pytest.mark.slow

#: MB a step that one node sent, full fine-tuning and LoRA.
MEASURED: dict[str, dict[Tuning, float]] = {
    "deepspeed-zero3": {"full": 21.68, "lora": 10.78},
    "deepspeed-hpz": {"full": 15.64, "lora": 0.17},
    "fcdp": {"full": 6.93, "lora": 0.077},
}
MODEL = model_spec("gpt2", layers=4, width=256)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    if missing := missing_capabilities():
        pytest.skip(f"needs {' and '.join(missing)}: run as root")
    with EmulatedCluster(
        ClusterSpec(nodes=NODES, ranks_per_node=RANKS_PER_NODE), preload=PRELOADED
    ) as built:
        yield built


CASES = [
    (strategy, tuning, pin)
    for strategy, by_tuning in MEASURED.items()
    for tuning in by_tuning
    for pin in (pins.PINS if strategy.startswith("deepspeed") else pins.PINS[:1])
]


@pytest.mark.parametrize(("strategy", "tuning", "pin"), CASES)
def test_the_first_measurements_are_reproduced(
    cluster: EmulatedCluster, tmp_path: Path, strategy: str, tuning: Tuning, pin: Pin
) -> None:
    if pins.version(pin) is None:
        pytest.skip(f"DeepSpeed ({pin}) is not installed: {pins.COMMANDS[pin]}")
    if strategy.startswith("deepspeed"):
        environment = {**os.environ, **pins.variables(pin)}
        command = [sys.executable, "-m", "baselines.deepspeed_zero3"]
        subprocess.run(command, env=environment, check=True)
    small = cell(
        strategy,
        tuning=tuning,
        deepspeed=pin,
        model=MODEL,
        sequence_length=128,
        dtype="bfloat16",
        timeout_s=120,
        warmup_steps=2,
        steps=2,
    )
    done = cells.run(cluster, small, tmp_path / "cell", cells.MEASURED_WORKER)
    assert done.measurement.parameters / 1e6 == pytest.approx(3.45, rel=0.02)
    print(done.sent / 1e6)
    assert done.sent / 1e6 == pytest.approx(MEASURED[strategy][tuning], rel=0.03)
