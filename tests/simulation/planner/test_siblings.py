"""LuWu is offered where there is a server, Fuyou on one GPU that nothing else fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.load import fuyou
from simulation.hardware import Hardware, cluster, share_of_peak
from simulation.luwu import nominal
from simulation.models import shape
from simulation.planner import report
from simulation.planner.plan import plan, refusal
from simulation.planner.request import Request
from simulation.planner.siblings import in_network, lack, out_of_core
from tests.simulation.planner.made_up import config_file, request

KINDS = ("fsdp2", "fcdp")


def with_server(asked: Request) -> Request:
    return replace(asked, server=nominal(100e9, 12, asked.hardware))


def small(directory: Path) -> Request:
    return request(str(config_file(directory)), strategies=KINDS)


def test_it_is_offered_where_there_is_a_server_and_the_rest_stays(tmp_path: Path) -> None:
    asked = small(tmp_path)
    without, served = plan(asked), plan(with_server(asked))
    assert without.in_network is None
    assert "luwu" not in report.document(without)
    assert report.rows(served) == report.rows(without)
    document = report.document(served)
    offered = document.pop("luwu")
    assert document == report.document(without)
    parameters = shape(asked.model, served.in_network.workload.sequence_length).parameters
    assert offered["server_sent"] == 4 * parameters
    assert offered["node_sent"] == 8 * 2 * parameters
    assert offered["files_bytes"] == 28 * parameters
    assert "a switch that sums and multicasts" in str(served.in_network)


def test_it_has_the_size_that_is_asked_for_and_says_where_that_does_not_fit(tmp_path: Path) -> None:
    asked = with_server(small(tmp_path))
    assert in_network(replace(asked, global_batch=64)).workload.micro_batch == 2
    large = replace(asked, micro_batches=(10**6,))
    assert in_network(large) is None
    assert "activations of 1000000 sequences" in lack(large)


def test_where_nothing_else_fits_it_is_named() -> None:
    asked = request(nodes=1, strategies=("fsdp2",), sequence_lengths=(512,))
    offered = in_network(with_server(asked))
    assert refusal(with_server(asked)).endswith(f"or {offered}")
    assert "luwu" not in refusal(asked)


def test_four_bits_are_not_its(tmp_path: Path) -> None:
    asked = request(
        str(config_file(tmp_path)), strategies=("ddp",), lora_rank=8, frozen_dtype="nf4"
    )
    assert in_network(with_server(asked)) is None
    # In words, and not as a lack of memory, which nobody has looked for.
    served = plan(with_server(asked))
    assert report.document(served)["luwu_lacks"] == "luwu does not hold frozen parameters in nf4"


def test_adapters_keep_their_base_in_host_memory(tmp_path: Path) -> None:
    asked = request(str(config_file(tmp_path)), strategies=KINDS, lora_rank=8)
    step = in_network(with_server(asked))
    assert step.workload.cached
    assert step.prediction.footprint.host_bytes > 0


def _one(gpu: str = "rtx4090", memory: float = 64e9, gpus: int = 1) -> Hardware:
    return cluster(
        gpu, nodes=1, ranks_per_node=gpus, inter_bits_per_s=1e10, host_memory_bytes=memory
    )


def test_it_is_named_where_nothing_fits_one_gpu() -> None:
    asked = request(hardware=_one())
    offered = out_of_core(asked)
    # Two generations of masters, moments and what is computed with.
    assert offered.ssd_bytes >= 28 * shape(asked.model, offered.length).parameters
    assert refusal(asked).endswith(f"or {offered}")
    assert "modelled, not simulated" in str(offered)
    more = out_of_core(request(hardware=_one(memory=512e9)))
    assert more.tokens_per_s >= offered.tokens_per_s


def test_it_is_not_where_it_cannot_train() -> None:
    several = request(hardware=_one(gpus=2))
    four_bits = request(hardware=_one(), lora_rank=8, frozen_dtype="nf4", strategies=("ddp",))
    no_host_memory = request(hardware=_one(memory=1e9))
    for asked in (several, four_bits, no_host_memory):
        assert out_of_core(asked) is None


def test_it_is_the_model_of_the_published_table(tmp_path: Path) -> None:
    """13B on the authors' machine, but for the head, a larger loss and inputs of half layers."""
    machine = replace(
        _one(memory=fuyou.DRAM - fuyou.TAKEN),
        rates=share_of_peak(_one().device, 1.0),
        host_to_device_bytes_per_s=fuyou.LINK,
        device_to_host_bytes_per_s=fuyou.LINK,
        disk_read_bytes_per_s=12 * fuyou.SSD_READ,
        disk_write_bytes_per_s=12 * fuyou.SSD_WRITE,
        cpu_adam_elements_per_s=1e9,
    )
    layers, width = fuyou.MODELS["13B"]
    sizes = {"n_layer": layers, "n_embd": width, "n_head": 40, "n_positions": fuyou.SEQUENCE}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256, **sizes}))
    (point,) = (p for p in fuyou.published() if (p.table, p.ssds, p.batch) == ("ssds", 12, 32))
    asked = request(str(file), hardware=machine, sequence_lengths=(1024,), micro_batches=(32,))
    made = out_of_core(asked)
    tflops = 3 * fuyou.work_of(point).flops / made.seconds / 1e12
    assert tflops == pytest.approx(fuyou.predicted(point, 1e9), rel=0.1)
