"""``python -m experiments plan``: its table, its JSON, its mistakes."""

import csv
import json
import re
from pathlib import Path

import pytest

from experiments.preflight.schema import Compute
from simulation.models import shape
from tests.experiments.command_line import command, printed, refused
from tests.experiments.preflight.made_up import preflight
from tests.simulation.planner.made_up import config_file

CLUSTER = {"--nodes": "4", "--gpus": "8", "--gpu": "a40", "--inter-node": "1Gbps"}
#: Options without those that preflight, or the table of instances, has instead.
BARE: dict[str, str | None] = {
    "nodes": None, "gpus": None, "inter_node": None, "strategies": "fsdp2"
}  # fmt: skip


def words(model: object, *more: object, **options: str | None) -> list[object]:
    """Words of a plan of ``CLUSTER``, but for ``options``; ``None`` leaves one out."""
    merged = CLUSTER | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    pairs = [part for name, value in merged.items() if value is not None for part in (name, value)]
    return ["plan", "--model", model, *pairs, *more]


def planned(*arguments: object, **options: str | None) -> str:
    return printed(*words(*arguments, **options))


def error(*arguments: object, **options: str | None) -> str:
    return refused(*words(*arguments, **options))


def test_the_json_has_the_grid_and_says_how_it_was_obtained(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "plan.json"
    planned("gpt-10b", "--json", file, strategies="fcdp,ddp", policies="host,disk")
    document = json.loads(file.read_text())
    assert document["evidence"] == "simulated"
    assert document["recommended"] == "fcdp"
    by_name = {verdict["strategy"]: verdict for verdict in document["strategies"]}
    assert "host" in {option["policy"] for option in by_name["fcdp"]["grid"]}
    assert by_name["fcdp"]["best"]["gpu_hours"] > 0
    assert by_name["fcdp"]["best"]["cost"] is None
    assert by_name["ddp"]["best"] is None
    assert by_name["ddp"]["lacks_device_bytes"] > 0


def test_a_preflight_stands_for_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight(across=2.5e9, free=10**11).model_dump_json())
    arguments = (config_file(tmp_path), "--preflight", file)
    measured = "8 a40 · 20 Gbit/s reached between nodes · 100 GB host memory"
    for changes, expected in (
        ({}, f"2 nodes × {measured}"),
        ({"nodes": "4"}, f"4 nodes × {measured}"),
        ({"inter_node": "10Gbps"}, "8 Gbit/s reached between nodes"),
    ):
        assert expected in planned(*arguments, **BARE | changes)
    message = error(*arguments, **BARE | {"gpu": None})
    assert message.startswith("error: gpu: is missing; a GPU was measured")


def test_a_link_that_was_not_measured_must_be_given_but_one_node_needs_none(tmp_path: Path) -> None:
    file = tmp_path / "preflight.json"
    file.write_text(preflight(nodes=1).model_dump_json())
    arguments = (config_file(tmp_path), "--preflight", file)
    output = planned(*arguments, "--json", tmp_path / "plan.json", **BARE)
    assert any(line.startswith("1 node × 8 a40 · 1000 GB") for line in output.splitlines())
    document = json.loads((tmp_path / "plan.json").read_text(), parse_constant=pytest.fail)
    assert document["inter_bytes_per_s"] is None
    missing = f"error: --inter-node is missing: {file} has measured no link between nodes"
    assert error(*arguments, **BARE | {"nodes": "4"}) == missing
    output = planned(config_file(tmp_path), **BARE | {"nodes": "1", "gpus": "8"})
    assert "1 node × 8 a40 · 512 GB host memory" in output


def test_a_cluster_of_cpus_is_planned_in_fp32(tmp_path: Path) -> None:
    cpu = Compute(device="cpu", matmul_flops_per_s={"float32": 1e10}, memory_bytes=None)
    measured, plan = tmp_path / "preflight.json", tmp_path / "plan.json"
    measured.write_text(preflight(across=1e6, backend="gloo", compute=cpu).model_dump_json())
    options = {"gpu": None, "strategies": "fcdp", "micro_batch": "1"}
    model = config_file(tmp_path, num_hidden_layers=1, hidden_size=64, vocab_size=256)
    planned(model, "--preflight", measured, "--json", plan, **BARE | options)
    best = json.loads(plan.read_text())["strategies"][0]["best"]
    parameters = shape(str(model), 512).parameters
    assert best["host_bytes"]["cache"] == pytest.approx(parameters * 4 / 2, rel=1e-3)


def test_what_to_rent(tmp_path: Path) -> None:
    file, rows = tmp_path / "rent.json", tmp_path / "rent.csv"
    options = {"peft": "lora:8", "sequence_length": "2048", "within": "24h", "strategies": "ddp"}
    bare = BARE | {"gpu": None}
    files = ("--instances", "all", "--json", file, "--csv", rows)
    output = command(*words("llama-3-8b", *files, **bare | options), COLUMNS="80").output
    assert "…" not in output, "a number is cut"
    assert "2048 tokens a sequence · 128 sequences (260 k tokens) per step" in output
    assert "1e+09 tokens in all within 24 hours" in " ".join(output.split())
    offers = json.loads(file.read_text())["offers"]
    costs = [offer["cost_usd"] for offer in offers]
    assert costs == sorted(costs)
    # Each with its chance to be in time.
    assert all(re.search(rf" {cost:,.0f} .* \d+% 20\d\d-", output) for cost in costs)
    assert all(offer["hours"] <= 24 and offer["source"] for offer in offers)
    assert [float(row["cost_usd"]) for row in csv.DictReader(rows.open())] == costs


def test_a_server_brings_luwu_into_the_plan(tmp_path: Path) -> None:
    model, file = config_file(tmp_path), tmp_path / "plan.json"
    options = {"strategies": "fsdp2", "server": "100Gbps,12"}
    output = planned(model, "--json", file, **options)
    assert "luwu, whose model lies on a server with 12 NVMe drives: " in output
    assert json.loads(file.read_text())["luwu"]["seconds"] > 0
    assert "luwu, whose" not in planned(model, strategies="fsdp2")


@pytest.mark.ranks
def test_a_picture_over_nodes_and_links(tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    options = {"strategies": "fsdp2,fcdp", "price_per_gpu_hour": "2"}
    planned("gemma-2b", "--json", file, "--figure", picture, **options)
    curves = json.loads(file.read_text())["curves"]
    nodes = [point["nodes"] for point in curves["nodes"] if point["strategy"] == "fcdp"]
    assert nodes == [1, 2, 4, 8, 16, 32]
    speeds = [point["tokens_per_s"] for point in curves["gbit_s"] if point["strategy"] == "fsdp2"]
    assert len(speeds) == 7
    assert speeds == sorted(speeds)
    assert all(point["low"] < point["tokens_per_s"] < point["high"] for point in curves["nodes"])
    assert picture.read_text().count("<path") > 50
    wrong = ("--figure", tmp_path / "plan.txt")
    assert "ends in none of .svg, .png, .pdf" in error("gemma-2b", *wrong, strategies="fsdp2")
