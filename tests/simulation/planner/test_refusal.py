"""What is said where nothing fits: how much is missing, and remedies that do help."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from simulation.hardware import cluster
from simulation.planner.plan import refusal
from simulation.planner.search import shortfalls
from tests.simulation.planner.made_up import config_file, request


def test_the_smallest_shortfall_and_what_helps() -> None:
    asked = request(nodes=1, strategies=("fsdp2", "fcdp", "ddp"))
    text = refusal(asked)
    assert re.match(r"nothing fits 1x8-a40: the closest, \w+, lacks [\d.]+ GB on each device", text)
    nodes = re.search(r"(\d+) nodes", text)
    assert nodes is not None
    more = replace(asked, hardware=replace(asked.hardware, nodes=int(nodes[1])))
    assert any(lack.fits for _, lack in shortfalls(more))
    half = replace(asked, hardware=replace(asked.hardware, nodes=int(nodes[1]) // 2))
    assert not any(lack.fits for _, lack in shortfalls(half))
    assert "--peft lora:8" in text


def test_host_memory_helps_where_only_that_is_missing() -> None:
    hardware = cluster(
        "a40", nodes=4, ranks_per_node=8, inter_bits_per_s=1e9, host_memory_bytes=20e9
    )
    asked = request(hardware=hardware, lora_rank=8, strategies=("fcdp",))
    text = refusal(asked)
    assert "lacks 23.4 GB of host memory on each node" in text
    needed = re.search(r"([\d.]+) GB of host memory a node", text)
    assert needed is not None
    enough = replace(hardware, host_memory_bytes=float(needed[1]) * 1e9 + 1e8)
    assert any(lack.fits for _, lack in shortfalls(replace(asked, hardware=enough)))


def test_a_shorter_sequence_helps_where_activations_are_too_large(tmp_path: Path) -> None:
    file = config_file(tmp_path, max_position_embeddings=10**6)
    asked = request(str(file), sequence_lengths=(200_000,), strategies=("fsdp2",))
    text = refusal(asked)
    length = re.search(r"sequences of (\d+) tokens", text)
    assert length is not None
    shorter = replace(asked, sequence_lengths=(int(length[1]),))
    assert any(lack.fits for _, lack in shortfalls(shorter))
    assert "nodes" not in text.partition("what would help")[2]


def test_a_global_batch_grows_with_the_nodes() -> None:
    asked = request(nodes=1, strategies=("fsdp2",), global_batch=8)
    assert re.search(r"what would help: \d+ nodes", refusal(asked))


def test_where_nothing_helps_that_is_said(tmp_path: Path) -> None:
    file = config_file(tmp_path, hidden_size=131072, vocab_size=2_000_000)
    asked = request(str(file), lora_rank=8, strategies=("fsdp2",))
    assert refusal(asked).endswith("what would help: GPUs with more memory")
