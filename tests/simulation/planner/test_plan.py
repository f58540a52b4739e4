"""The plan's recommendation, and what it says about FCDP; where nothing fits, what would help."""

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.settings import PipelineSettings
from simulation.planner.plan import Plan, plan, refusal, typed
from simulation.planner.report import table, titles
from simulation.planner.request import Request
from simulation.planner.search import _fitting, shortfalls, simulated
from simulation.prediction import needed
from tests.experiments.command_line import rendered
from tests.experiments.golden import cases
from tests.simulation.planner.made_up import config_file, rented, request
from tests.simulation.workloads import hardware

SMALL_HOSTS = hardware(1e9, nodes=4, host_memory_bytes=20e9)


def planned(**settings: object) -> Plan:
    return plan(request(**settings))  # type: ignore[arg-type]


SMALL = {"model": "gpt-10b", "strategies": ("fsdp2",)}
#: Requests as YAML, and what the plan says of each; a semicolon ends a line of it.
SAYS = cases(Path(__file__).with_name("says.txt"))


@pytest.mark.parametrize("case", SAYS)
def test_a_plan_says(case: str) -> None:
    """Replicas of a bf16 base may take a cache's place; kernels that are named are not open."""
    asked: dict[str, Any] = {"strategies": ("ddp", "fsdp2", "fsdp2-hsdp", "deepspeed-hpz", "fcdp")}
    asked |= yaml.safe_load(case)
    match asked.pop("cluster", None):
        case "small hosts":
            asked["hardware"] = SMALL_HOSTS
        case {**named} if named:
            asked["hardware"] = rented(**named)
    lists = {name: tuple(each) for name, each in asked.items() if isinstance(each, list)}
    (says,) = SAYS[case]
    lines = rendered(table(planned(**(asked | lists))), 1000)
    assert says in ";\n".join([*lines, ""])


def test_the_collector_runs_again_after_a_plan() -> None:
    assert planned(**SMALL)
    assert gc.isenabled()


def test_sums_of_many_micro_batches_wait_on_the_host_where_the_device_is_too_small() -> None:
    """70B on four nodes of eight: the sums alone would take 35 GB of each device."""
    asked: dict[str, Any] = {"model": "llama-3-70b", "hardware": rented("h100-sxm", gbit_s=25)}
    rivals = ("deepspeed-hpz-offload", "fcdp")
    made = planned(**asked, global_batch=512, strategies=rivals)
    assert made.strategy == "fcdp"
    assert made.option.workload.partial_gradients == "host"
    on_device = replace(made.option.workload, partial_gradients="device")
    unlimited = simulated(on_device, asked["hardware"]).step_seconds
    assert made.option.step_seconds < 1.03 * unlimited  # its copies are beside backward
    other = made.fitting[-1]
    assert made.option.tokens_per_s > 3 * other.tokens_per_s
    assert any(line.startswith("fcdp, sums on the host") for line in rendered(table(made)))
    assert all(one.workload.partial_gradients == "device" for one in made.fitting[1:])


def test_sums_of_a_pipeline_that_fit_the_host_alone_are_said_in_what_to_type() -> None:
    """One micro-batch per rank is two of a pipeline of two groups, whose gradients are summed."""
    asked = request("llama-3-70b", hardware=rented("h100-sxm", gbit_s=25), global_batch=32)
    (point,) = (
        each
        for each in replace(asked, strategies=("pipeline",), recomputed=(1.0,)).workloads()
        if each.nodes_per_stage == 2
        and each.pipeline_schedule == "ahead"
        and each.partial_gradients == "host"
    )
    on_device = replace(point, partial_gradients="device")
    lacks = [needed(each, asked.hardware).lacks(asked.hardware) for each in (on_device, point)]
    assert [lack.fits for lack in lacks] == [False, True]
    assert _fitting(point, asked) == [point]
    words = typed(point).removeprefix("strategy: pipeline, ").removesuffix(" (in a matrix)")
    pairs = (each.split(": ") for each in words.split(", "))
    settings = PipelineSettings.model_validate(dict(pairs))
    assert all(getattr(point, name) == value for name, value in settings)
    assert settings.partial_gradients == "host"


def test_several_lengths_are_one_row_of_each_strategy_and_said_with_their_tokens() -> None:
    lengths = {"sequence_lengths": (512, 1024), "strategies": ("fsdp2", "pipeline")}
    made = planned(model="gpt-10b", lora_rank=8, global_batch=64, **lengths)
    assert sorted(one.name for one in made.verdicts) == ["fsdp2", "pipeline", "pipeline of fcdp"]
    assert titles(made.request)[0].endswith("64 sequences (33 k, 66 k tokens) per step")
    (whole, *_) = titles(request("gpt-10b", global_batch="usual", **lengths))
    assert whole.endswith("1,024, 512 sequences (0.52 M tokens) per step")


def test_what_quantises_is_shown_and_not_taken() -> None:
    made = planned(gbit_s=5, strategies=("fsdp2", "qwz"))
    assert made.strategy == "fsdp2"
    assert made.verdicts[0].strategy == "qwz"
    assert planned(gbit_s=5, strategies=("qwz",)).strategy == "qwz"


def test_hours_and_cost_follow_from_the_throughput() -> None:
    made = planned(tokens=1e9, price_per_gpu_hour=0.5, strategies=("fcdp",))
    hours = made.hours(made.option)
    assert hours * 3600 * made.option.tokens_per_s / 32 == pytest.approx(1e9)
    assert made.cost(made.option) == pytest.approx(hours / 2)
    assert replace(made, request=request()).cost(made.option) is None


def test_nothing_is_said_of_loading_what_is_cut_or_offloaded() -> None:
    hardware = rented("h100-sxm", 4, 8)
    for strategy in ("pipeline", "fcdp-offload"):
        made = planned(hardware=hardware, lora_rank=8, strategies=(strategy,))
        assert made.taken.uses_fcdp
        assert "loading it" not in "".join(rendered(table(made)))


def test_a_base_on_the_devices_goes_before_length() -> None:
    """People train on one such card by a replica of the base, and shorter sequences."""
    asked = {"model": "llama-3-8b", "hardware": rented("a10g", 1, 1), "lora_rank": 8}
    made = planned(**asked, strategies=("ddp", "fsdp2-offload"))
    assert made.request.sequence_lengths == (2048,)
    assert next(one for one in made.verdicts if one.strategy == "ddp").best is not None
    assert "(usual are 8192, with which the base fits host memory or disks alone)" in " ".join(
        titles(made.request)
    )
    alone = planned(**asked, strategies=("fsdp2-offload",))
    assert alone.request.sequence_lengths == (8192,)


def test_what_helps_may_need_shorter_sequences_too() -> None:
    """As a plan of such nodes, or with such adapters, has them."""
    asked = Request(
        model="llama-3-70b",
        hardware=replace(rented("rtx3090", ranks=1, gbit_s=100), host_memory_bytes=64e9),
        strategies=("fsdp2", "fsdp2-offload"),
        global_batch="usual",
    )
    assert plan(asked) is None
    found = re.search(r"what would help: (\d+) nodes, or adapters", refusal(asked))
    assert found
    made = plan(replace(asked, hardware=replace(asked.hardware, nodes=int(found[1]))))
    assert made is not None
    assert made.request.sequence_lengths[0] < 8192


def test_the_smallest_shortfall_and_what_helps() -> None:
    asked = request(nodes=1, strategies=("fsdp2", "fcdp", "ddp"))
    text = refusal(asked)
    assert re.match(r"nothing fits 1x8-a40: the closest, \w+, lacks [\d.]+ GB on each device", text)
    nodes = re.search(r"(\d+) nodes", text)
    more = replace(asked, hardware=replace(asked.hardware, nodes=int(nodes[1])))
    assert any(lack.fits for _, lack in shortfalls(more))
    half = replace(asked, hardware=replace(asked.hardware, nodes=int(nodes[1]) // 2))
    assert not any(lack.fits for _, lack in shortfalls(half))
    assert "--peft lora:8" in text


def test_host_memory_helps_where_only_that_is_missing() -> None:
    asked = request(hardware=SMALL_HOSTS, lora_rank=8, strategies=("fcdp",))
    text = refusal(asked)
    assert "lacks 23.4 GB of host memory on each node" in text
    needed = re.search(r"([\d.]+) GB of host memory a node", text)
    enough = replace(SMALL_HOSTS, host_memory_bytes=float(needed[1]) * 1e9 + 1e8)
    assert any(lack.fits for _, lack in shortfalls(replace(asked, hardware=enough)))


def test_a_shorter_sequence_helps_where_activations_are_too_large(tmp_path: Path) -> None:
    file = config_file(tmp_path, max_position_embeddings=10**6)
    asked = request(str(file), sequence_lengths=(200_000,), strategies=("fsdp2",))
    text = refusal(asked)
    length = re.search(r"sequences of (\d+) tokens", text)
    shorter = replace(asked, sequence_lengths=(int(length[1]),))
    assert any(lack.fits for _, lack in shortfalls(shorter))
    assert "nodes" not in text.partition("what would help")[2]


def test_nodes_help_a_global_batch_too_and_where_nothing_does_larger_gpus(tmp_path: Path) -> None:
    asked = request(nodes=1, strategies=("fsdp2",), global_batch=8)
    assert re.search(r"what would help: \d+ nodes", refusal(asked))
    file = config_file(tmp_path, hidden_size=131072, vocab_size=2_000_000)
    asked = request(str(file), lora_rank=8, strategies=("fsdp2",))
    assert refusal(asked).endswith("what would help: GPUs with more memory")
