"""Other people's trainers with FCDP, beside themselves with FSDP2: histories, parameters, bytes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients/bin/python"

#: Cases by client, as ``CASES`` of their modules names them.
HUGGING_FACE = ("trainer", "sft", "sft-lora", "dpo", "dpo-lora", "grpo", "grpo-lora")
SYNCED = ("dpo-sync", "grpo-sync")
OPTIONS = ("sft-bf16", "sft-ram", "sft-offload", "sft-resume", "sft-lora-accumulated", "grpo-long")
LIGHTNING = ("fabric", "fabric-lora-accumulated", "trainer", "trainer-lora-accumulated")
TORCHTITAN = ("dp", "dp-accumulated")
#: Clients that reduce each micro-batch by itself without FCDP: sums of another order.
ROUNDED = {("lightning", "trainer-lora-accumulated"), ("torchtitan", "dp-accumulated")}


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("FCDP_CLIENTS_PYTHON", str(PYTHON))
    if not Path(found).exists():
        pytest.skip("other people's trainers are not installed: make clients")
    return found


def found(
    python: str, client: str, nodes: int, per_node: int, cases: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    out = folder / "found.json"
    command = [python, "-m", "tests.clients.ranks", client, str(nodes), str(per_node), str(out)]
    done = subprocess.run(
        [*command, *cases], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return results


def gathered(result: dict[str, Any]) -> int:
    sent = result["ledger"]["inter_node"]
    return int(sent["forward"] + sent.get("backward", 0))


@pytest.mark.parametrize(
    ("client", "cases"),
    [
        ("hugging_face", ("alone", *HUGGING_FACE)),
        ("hugging_face", SYNCED + OPTIONS),
        ("lightning", LIGHTNING),
        ("torchtitan", TORCHTITAN),
    ],
    ids=["trl", "options", "lightning", "torchtitan"],
)
def test_two_nodes_train_as_fsdp2_to_the_bit(
    python: str, client: str, cases: tuple[str, ...], tmp_path: Path
) -> None:
    results = found(python, client, 2, 1, cases, tmp_path)
    alone = gathered(results.pop("alone")) if "alone" in results else 0
    for case, result in results.items():
        exact = (client, case) not in ROUNDED
        assert result["same_history"] or not exact, case
        assert result["apart"] <= (0.0 if exact else 1e-4), case
        assert result["hits"] > 0 or "trainer" in case, case
    if client == "hugging_face" and "sft-lora" in results:
        # Frozen weights cross once; of each step's gathers those of adapters alone do.
        assert alone < gathered(results["sft"]) / 2
        for case in ("sft-lora", "dpo-lora", "grpo-lora"):
            assert gathered(results[case]) == pytest.approx(alone, rel=0.05), case
    if "grpo-long" in results:
        assert gathered(results["grpo-long"]) == gathered(results["grpo-sync"])
        once, twice = results["sft-lora-accumulated"]["by_accumulation"]
        assert once == twice


@pytest.mark.parametrize(
    ("client", "cases"),
    [
        ("hugging_face", ("sft-lora", "dpo", "grpo-lora")),
        ("lightning", ("fabric", "trainer")),
        ("torchtitan", ("dp", "dp-tp")),
    ],
    ids=["trl", "lightning", "torchtitan"],
)
def test_two_nodes_of_two_ranks_train_as_fsdp2_to_rounding(
    python: str, client: str, cases: tuple[str, ...], tmp_path: Path
) -> None:
    for case, result in found(python, client, 2, 2, cases, tmp_path).items():
        assert result["apart"] < 1e-4, case


@pytest.mark.parametrize(
    "name", ["sft", "dpo", "grpo", "trainer", "lightning_trainer", "torchtitan_llama"]
)
def test_examples_run_from_an_empty_folder(python: str, name: str, tmp_path: Path) -> None:
    script = ROOT / "examples/trainers" / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    flags = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    flags += ["--master-addr", "127.0.0.1", "--master-port", "29533"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [python, *flags, "--node-rank", str(node), str(script)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    for node in nodes:
        output, _ = node.communicate(timeout=400)
        assert node.returncode == 0, output[-4000:]
        assert "hits" in output
