"""Plans for what people train and rent: each is answered, in time; all with ``--exhaustive``."""

import random
import time
from itertools import product
from typing import Any

import pytest

from simulation.planner.plan import plan, refusal
from simulation.planner.request import Request
from simulation.planner.search import tokens_range
from tests.simulation.planner.made_up import rented

MODELS = ("llama-3-8b", "llama-3-70b", "qwen2-7b", "mistral-7b", "mixtral-8x7b", "gpt-30b")
GPUS = ("a10g", "l4", "rtx4090", "a40", "a100-40gb", "a100-80gb", "h100-sxm", "h200", "b200")
NODES = (1, 4, 16, 64)
GBIT_S = (1, 10, 100, 800, 3200)
TUNING: tuple[dict[str, Any], ...] = ({}, {"lora_rank": 8}, {"lora_rank": 8, "frozen_dtype": "nf4"})
POINTS = list(product(MODELS, GPUS, NODES, GBIT_S, TUNING))
#: Seconds of CPU that an answer takes at most.
IN_TIME = 5.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--exhaustive")
    points = POINTS if whole else random.Random(18).sample(POINTS, 6)
    metafunc.parametrize(("model", "gpu", "nodes", "gbit_s", "tuning"), points)


def test_it_is_answered(
    model: str, gpu: str, nodes: int, gbit_s: float, tuning: dict[str, Any]
) -> None:
    hardware = rented(gpu, nodes, gbit_s=gbit_s)
    before = time.process_time()
    request = Request(model=model, hardware=hardware, **tuning)
    made = plan(request)
    answer = refusal(request) if made is None else made.reason
    assert time.process_time() - before < IN_TIME
    if made is None:
        assert answer.startswith("nothing fits")
        return
    for option in (option for verdict in made.verdicts for option in verdict.options):
        low_high = tokens_range(option, made.request)
        assert option.footprint.device_bytes <= hardware.usable_device_bytes
        assert option.footprint.host_bytes <= hardware.host_memory_bytes
        assert 0 < option.mfu <= option.hfu + 1e-9 <= 1
        assert 0 < low_high[0] <= option.tokens_per_s <= low_high[1] < float("inf")
        assert max(option.busy_seconds.values()) <= (1 + 1e-6) * option.step_seconds
        assert sum(option.waits_seconds.values()) == pytest.approx(option.step_seconds, rel=1e-2)
        assert option.inter_node_bytes >= 0
    if nodes == 1 and made.strategy != "fcdp" and "fcdp" in request.answered:
        assert "FCDP is worth nothing on one node" in answer or "fcdp" in answer
