"""Differences on a GPU: the coder beside a copy, and a step with them beside one without.

The other node is imitated, and what goes to it is copied inside the device: a step says what coding
costs, and nothing of a link.
"""

import gc
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fcdp
from fcdp.delta.on_device import Counts, Encoding, count
from scripts import fake_world
from tests.fcdp.cuda.alone import DEVICE, ON_GPU, alone
from tests.fcdp.cuda.steps import MOST_TRACE_BYTES, ROUNDS, Step, seconds_of, write_trace

pytestmark = pytest.mark.gpu

#: 268 MB in bf16.
ELEMENTS = 2**27 if ON_GPU else 2**14
RATES = (3e-5, 1e-5, 1e-6)
#: 10⁹ bytes of a shard per second: 100 Gbit/s per GPU.
LEAST_SPEED = 12.5


def test_coding_is_fast(record_property: Callable[[str, object], None]) -> None:
    by_rate = alone(speeds)
    record_property("gb_per_s", by_rate)
    for rate, of in by_rate.items():
        assert of["bits"] < 4, rate
        slowest = 1 / (1 / of["count"] + 1 / of["write"])
        assert not ON_GPU or min(slowest, of["read"]) >= LEAST_SPEED, (rate, of)


def speeds() -> dict[float, dict[str, float]]:
    """Return, by learning rate, bits per element and 10⁹ bytes per second of each part."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(ELEMENTS, generator=generator, device=DEVICE)

    weights, steps = 0.02 * drawn(), drawn().clamp_(-2, 2) / 2
    base, by_rate = weights.bfloat16(), {}
    for rate in RATES:
        new = (weights - rate * steps).bfloat16()
        encoding = Encoding.smallest(1, [Counts(*count(new, base).tolist())], ELEMENTS)
        row, message = base.clone(), encoding.write(new, base, 0)
        assert not encoding.read(message, row, 0)
        assert torch.equal(row, new)
        seconds = {
            "count": median(lambda: count(new, base)),  # noqa: B023
            "write": median(lambda: encoding.write(new, base, 0)),  # noqa: B023
            "read": median(lambda: encoding.read(message, row, 0)),  # noqa: B023
            "copy": median(lambda: row.copy_(base)),  # noqa: B023
        }
        speed = {name: new.nbytes / 1e9 / each for name, each in seconds.items()}
        by_rate[rate] = speed | {"bits": 8 * encoding.row_bytes(new) / ELEMENTS}
    return by_rate


def median(call: Callable[[], object]) -> float:
    seconds_of(call)
    return statistics.median(seconds_of(call) for _ in range(ROUNDS))


def test_a_step_blocks_in_no_more_calls_and_takes_no_memory(
    artifacts: Path, record_property: Callable[[str, object], None]
) -> None:
    trace = artifacts / "trace-differences.json.gz"
    measured = alone(steps_with_and_without, trace)
    for name, value in measured.items():
        record_property(name, value)
    assert trace.stat().st_size <= MOST_TRACE_BYTES
    assert measured["sent"]["differences"] < measured["sent"]["whole"] / 4
    # Reads of results are counted; the one wait for an event, in ``learn``, is none of them.
    assert measured["blocking"]["differences"] == measured["blocking"]["whole"]
    assert measured["grown"]["differences"] == 0


def steps_with_and_without(trace: Path) -> dict[str, Any]:
    """Seconds, calls that block the host, memory and bytes of steps that change the weights."""
    seconds: dict[str, list[float]] = {}
    blocking, grown, sent = {}, {}, {}
    codecs = {"whole": None, "differences": fcdp.Delta("always")}
    with fake_world.world(2, 1, DEVICE.type) as topology:
        for name, codec in codecs.items():
            step = Step(topology, "host", 1e-5, gather_codec=codec)
            for _ in range(3):
                step()
            reserved = memory()
            seconds[name] = [seconds_of(step) for _ in range(ROUNDS)]
            grown[name] = memory() - reserved
            ledger = fcdp.ledger(step.model)
            ledger.reset()
            blocking[name] = blocked(step)
            sent[name] = ledger.bytes["inter_node"]["forward"]
            if codec is not None:
                write_trace(step, trace)
            del step, ledger
            gc.collect()  # a model and its hooks know each other
    return {"seconds": seconds, "blocking": blocking, "grown": grown, "sent": sent}


def memory() -> int:
    return torch.cuda.memory_reserved() if ON_GPU else 0


def blocked(step: Callable[[], None]) -> list[str]:
    """Calls of a step that made the host wait for the device, as PyTorch sees it."""
    if not ON_GPU:
        step()
        return []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(each.filename).name}: {each.message}"[:200] for each in caught]
