"""``python -m experiments plan``: its table, its JSON, its mistakes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.preflight.schema import Compute
from simulation.models import shape
from tests import programs
from tests.experiments.preflight.made_up import preflight
from tests.simulation.planner.made_up import config_file

CLUSTER = {"--nodes": "4", "--gpus": "8", "--gpu": "a40", "--inter-node": "1Gbps"}
#: Without what is known of measured nodes, and of those to be rented.
BARE: dict[str, str | None] = {
    "nodes": None, "gpus": None, "inter_node": None, "strategies": "fsdp2"
}  # fmt: skip


def command(model: str, *more: str, **options: str | None) -> Any:
    """With ``CLUSTER``, but for the options given; ``None`` leaves one out."""
    given = CLUSTER | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    pairs = [part for name, value in given.items() if value is not None for part in (name, value)]
    return CliRunner().invoke(app, ["plan", "--model", model, *pairs, *more])


def test_a_plan_for_adapters() -> None:
    result = command(
        "gpt-30b", peft="lora:8", strategies="fsdp2,fcdp,ddp", price_per_gpu_hour="0.5"
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "gpt-30b · LoRA 8 on bf16 · 512 tokens a sequence"
    assert lines[1].startswith("4 nodes × 8 a40 · 800 Mbit/s reached between nodes · 512 GB host")
    assert lines[1].endswith("simulated")
    assert lines[2].startswith("computation, flash kernels: no run on a40 is known: data")
    assert [line.split()[0].strip(",") for line in lines[6:8]] == ["fcdp", "fsdp2"]
    assert any(line.startswith("ddp does not fit: it lacks ") for line in lines)
    assert any(line.startswith("take fcdp: fcdp trains ") for line in lines)


def test_the_json_has_the_grid_and_says_how_it_was_obtained(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "plan.json"
    result = command("gpt-10b", "--json", str(file), strategies="fcdp,ddp", policies="host,disk")
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert document["evidence"] == "simulated"
    assert document["recommended"] == "fcdp"
    by_name = {verdict["strategy"]: verdict for verdict in document["strategies"]}
    assert "host" in {option["policy"] for option in by_name["fcdp"]["grid"]}
    assert by_name["fcdp"]["best"]["gpu_hours"] > 0
    assert by_name["fcdp"]["best"]["cost"] is None
    assert by_name["ddp"]["best"] is None
    assert by_name["ddp"]["lacks_device_bytes"] > 0


def test_several_lengths_and_steps_of_many_micro_batches(tmp_path: Path) -> None:
    model = str(config_file(tmp_path))
    result = command(
        model, strategies="fcdp", sequence_length="1024,2048", micro_batch="2", global_batch="256"
    )
    assert result.exit_code == 0, result.output
    assert "1024, 2048 tokens a sequence" in " ".join(result.stdout.split())
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("fcdp "))
    assert row[1:3] == ["2048", "2×4"]  # a slow link favours long steps


def test_a_preflight_stands_for_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight(across=2.5e9, free=10**11).model_dump_json())
    result = command(str(config_file(tmp_path)), "--preflight", str(file), **BARE)
    assert result.exit_code == 0, result.output
    measured = "8 a40 · 20 Gbit/s reached between nodes · 100 GB host memory"
    assert f"2 nodes × {measured}" in result.stdout
    result = command("gpt-10b", "--preflight", str(file), **BARE | {"nodes": "4"})
    assert f"4 nodes × {measured}" in result.stdout
    result = command("gpt-10b", "--preflight", str(file), **BARE | {"inter_node": "10Gbps"})
    assert "8 Gbit/s reached between nodes" in result.stdout
    result = command("gpt-10b", "--preflight", str(file), **BARE | {"gpu": None})
    assert result.exit_code == 2
    assert result.stderr.startswith("error: gpu: is missing; a GPU was measured")


def test_a_link_that_was_not_measured_must_be_given(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight(nodes=1).model_dump_json())
    model, measured = str(config_file(tmp_path)), ("--preflight", str(file))
    result = command(model, *measured, "--json", str(tmp_path / "plan.json"), **BARE)
    assert result.stdout.splitlines()[1].startswith("1 node × 8 a40 · 1000 GB")
    document = json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)
    assert document["inter_bytes_per_s"] is None
    result = command(model, *measured, **BARE | {"nodes": "4"})
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --inter-node is missing: {file} has measured no link between nodes\n"
    )
    result = command(model, *measured, **BARE | {"nodes": "4", "inter_node": "10Gbps"})
    assert "4 nodes × 8 a40 · 8 Gbit/s reached between nodes" in result.stdout


def test_a_cluster_of_cpus_is_planned_in_fp32(tmp_path: Path) -> None:
    cpu = Compute(
        device="cpu",
        matmul_flops_per_s={"float32": 1e10},
        alone_matmul_flops_per_s={"float32": 2e10},
        memory_bytes=None,
    )
    measured, plan = tmp_path / "preflight.json", tmp_path / "plan.json"
    measured.write_text(preflight(across=1e6, backend="gloo", compute=cpu).model_dump_json())
    given = {"gpu": None, "strategies": "fcdp", "micro_batch": "1"}
    model = str(config_file(tmp_path, num_hidden_layers=1, hidden_size=64, vocab_size=256))
    files = ("--preflight", str(measured), "--json", str(plan))
    result = command(model, *files, **BARE | given)
    assert result.exit_code == 0, result.output
    best = json.loads(plan.read_text())["strategies"][0]["best"]
    parameters = shape(model, 512).parameters
    assert best["host_bytes"]["cache"] == pytest.approx(parameters * 4 / 2, rel=1e-3)


def test_one_node_needs_no_link(tmp_path: Path) -> None:
    model = str(config_file(tmp_path))
    result = command(model, nodes="1", inter_node=None, strategies="fsdp2,fcdp")
    assert result.exit_code == 0, result.output
    assert "1 node × 8 a40 · 512 GB host memory" in result.stdout
    assert "take fsdp2: " in result.stdout


def test_what_to_rent(tmp_path: Path) -> None:
    file, rows = tmp_path / "rent.json", tmp_path / "rent.csv"
    given = {"peft": "lora:8", "sequence_length": "2048", "within": "24h", "strategies": "ddp"}
    bare = BARE | {"gpu": None}
    files = ("--instances", "all", "--json", str(file), "--csv", str(rows))
    result = command("llama-3-8b", *files, **bare | given)
    assert result.exit_code == 0, result.output
    assert "1e+09 tokens within 24 hours · 2048 tokens a sequence" in result.stdout
    offers = json.loads(file.read_text())["offers"]
    costs = [offer["cost_usd"] for offer in offers]
    assert costs == sorted(costs)
    assert all(offer["hours"] <= 24 and offer["source"] for offer in offers)
    read = list(csv.DictReader(rows.open()))
    assert [float(row["cost_usd"]) for row in read] == costs
    result = command("llama-3-8b", "--instances", "all", **bare | {"nodes": "2"})
    assert result.stderr == "error: --nodes = '2': not allowed with --instances, which says it\n"
    result = command("llama-3-8b", within="24h")
    assert result.stderr == "error: --within = '24h': needs --instances\n"


def test_nothing_fits() -> None:
    result = command("gpt-30b", nodes="1", strategies="fsdp2,fcdp")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: nothing fits 1x8-a40: the closest, ")
    assert "what would help: " in result.stderr


def test_a_server_brings_luwu_into_the_plan(tmp_path: Path) -> None:
    model, file = str(config_file(tmp_path)), tmp_path / "plan.json"
    result = command(model, "--json", str(file), strategies="fsdp2", server="100Gbps,12")
    assert result.exit_code == 0, result.output
    assert "luwu, whose model lies on a server with 12 NVMe drives: " in result.stdout
    assert json.loads(file.read_text())["luwu"]["seconds"] > 0
    assert "luwu, whose" not in command(model, strategies="fsdp2").stdout


def test_with_a_server_one_nodes_link_counts_too(tmp_path: Path) -> None:
    given = {"strategies": "fsdp2", "server": "100Gbps,12", "nodes": "1"}
    model = str(config_file(tmp_path))
    assert command(model, **given).exit_code == 0
    result = command(model, **given, inter_node=None)
    assert result.exit_code == 2
    assert "--inter-node is missing" in result.output


@pytest.mark.ranks
def test_a_picture_over_nodes_and_links(tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    more = ("--json", str(file), "--figure", str(picture))
    result = command("gemma-2b", *more, strategies="fsdp2,fcdp", price_per_gpu_hour="2")
    assert result.exit_code == 0, result.output
    curves = json.loads(file.read_text())["curves"]
    assert [one["nodes"] for one in curves["nodes"] if one["strategy"] == "fcdp"] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    speeds = [one["tokens_per_s"] for one in curves["gbit_s"] if one["strategy"] == "fsdp2"]
    assert len(speeds) == 7
    assert speeds == sorted(speeds)
    assert all(one["low"] < one["tokens_per_s"] < one["high"] for one in curves["nodes"])
    assert picture.read_text().count("<path") > 50
    wrong = command("gemma-2b", "--figure", str(tmp_path / "plan.txt"), strategies="fsdp2")
    assert wrong.exit_code == 2
    assert "ends in none of .svg, .png, .pdf" in wrong.output


def test_a_picture_needs_a_link(tmp_path: Path) -> None:
    figure = ("--figure", str(tmp_path / "plan.svg"))
    result = command("gemma-2b", *figure, nodes="1", inter_node=None, strategies="fsdp2")
    assert result.exit_code == 2
    assert "--figure: needs the bandwidth of a node's link" in result.output


@pytest.mark.ranks
def test_a_plan_starts_without_what_takes_long_to_import() -> None:
    program = (
        "import sys\n"
        "from experiments.__main__ import app\n"
        "try: app([*sys.argv[1:]])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    options = ["--model", "gemma-2b", *(part for pair in CLUSTER.items() for part in pair)]
    done = programs.ended(sys.executable, "-c", program, "plan", *options)
    assert "take " in done.stdout
    late = {"torch", "numpy", "pandas", "matplotlib", "transformers", "experiments.records.cell"}
    assert not late & {*done.stderr.split()}
