"""Fuyou is offered on one GPU that nothing else fits, by its cost model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulation import fuyou
from simulation.hardware import Hardware, cluster
from simulation.models import shape
from simulation.planner.plan import refusal
from simulation.planner.siblings import out_of_core
from tests.simulation.planner.made_up import request


def _one(gpu: str = "rtx4090", memory: float = 64e9, gpus: int = 1) -> Hardware:
    return cluster(
        gpu, nodes=1, ranks_per_node=gpus, inter_bits_per_s=1e10, host_memory_bytes=memory
    )


def test_it_is_named_where_nothing_fits_one_gpu() -> None:
    asked = request(hardware=_one())
    offered = out_of_core(asked)
    assert offered is not None
    # Two generations of masters, moments and what is computed with.
    assert offered.ssd_bytes >= 28 * shape(asked.model, offered.length).parameters
    assert refusal(asked).endswith(f"or {offered}")
    assert "modelled, not simulated" in str(offered)
    more = out_of_core(request(hardware=_one(memory=512e9)))
    assert more is not None
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
        matmul_efficiency=1.0,
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
    assert made is not None
    tflops = 3 * fuyou.work_of(point).flops / made.seconds / 1e12
    assert tflops == pytest.approx(fuyou.predicted(point, 1e9), rel=0.1)
