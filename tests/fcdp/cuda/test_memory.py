"""Device memory beside FSDP2's, as one of 16 ranks has it: others are imitated.

What the device still reads cannot be reused, so memory shows what is in flight: with a GPU that is
slower than its host a library that holds gathered units too long grows towards the whole model.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import fcdp
from fcdp import exchange
from scripts import fake_world
from tests.fcdp.cuda.alone import DEVICE, ENGINES, ON_GPU, alone, shard

pytestmark = pytest.mark.gpu

NODES, RANKS_PER_NODE, LOOK_AHEAD = 2, 8, 1
#: Square units of ``WIDTH``² values in bf16, 24 of 200 MB. One product of 8,192 rows takes some
#: 2.5 ms: a unit keeps the GPU busy for ten.
UNITS, WIDTH, PRODUCTS, TOKENS = (24, 10_000, 4, 8192) if ON_GPU else (4, 64, 1, 8)
STEPS = 3
#: Slices that a gather may have in flight: a ring of two, and what is fetched ahead. The allocator
#: takes segments of 2 MiB and more; the small ones of a step beside FSDP2's.
SLICES, SEGMENT, SMALL = 2 + LOOK_AHEAD, 2 * 2**20, 32 * 2**20
UNIT = 2 * WIDTH**2
SLICE = -(-UNIT // RANKS_PER_NODE // SEGMENT) * SEGMENT
#: And gradients of one unit more, whose reduction crosses nodes while the next ones' is queued.
ACTIVE = SLICES * SLICE + UNIT + SMALL
#: The allocator keeps segments by stream: what forward's gathers leave is not for backward's copies
#: from the host, of which one is read and others are fetched ahead.
ALLOWED = {"active_bytes": ACTIVE, "reserved_bytes": ACTIVE + (1 + LOOK_AHEAD) * SLICE}


def test_a_cache_takes_slices_in_flight_beyond_fsdp2(
    record_property: Callable[[str, object], None],
) -> None:
    by_engine = {engine: alone(peaks, engine) for engine in ENGINES}
    assert by_engine["host"].pop("hits") > 0
    if not ON_GPU:
        return
    for engine, of in by_engine.items():
        record_property(engine, of)
        for name, allowed in ALLOWED.items():
            assert of[name] <= by_engine["fsdp2"][name] + allowed, (engine, name)
        assert of["retries"] <= by_engine["fsdp2"]["retries"], engine
    assert by_engine["fsdp2"]["ran_ahead"], "the GPU was idle: memory shows nothing in flight"


class Busy(nn.Module):
    """A unit that keeps the GPU busy for long and takes little memory but its weight."""

    def __init__(self, scratch: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device=DEVICE))
        nn.init.normal_(self.weight, std=0.1 * WIDTH**-0.5)
        self._scratch = scratch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor, product = self._scratch
        with torch.no_grad():
            for _ in range(PRODUCTS):
                torch.mm(factor, self.weight, out=product)
        return x + nn.functional.linear(x, self.weight)


def peaks(engine: str) -> dict[str, Any]:
    """Peaks of the allocator over some steps, and whether the host was ahead of the device."""
    like: Any = {"dtype": torch.bfloat16, "device": DEVICE}
    with fake_world.world(NODES, RANKS_PER_NODE, DEVICE.type) as topology:
        scratch = torch.randn(TOKENS, WIDTH, **like), torch.empty(TOKENS, WIDTH, **like)
        model = nn.Sequential(*(Busy(scratch) for _ in range(UNITS)))
        shard(model, model, topology, engine, LOOK_AHEAD)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        x = torch.randn(8, WIDTH, **like)
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what sharding left
            torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):  # the first forward also loads kernels: the last one counts
            loss = model(x).float().square().mean()
            measured = {"ran_ahead": ON_GPU and not torch.cuda.current_stream().query()}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.synchronize()
            counted = torch.cuda.memory_stats()
            measured |= {n: counted[f"{n}.all.peak"] for n in ("active_bytes", "reserved_bytes")}
            measured["retries"] = counted.get("num_alloc_retries", 0)
        return measured if engine == "fsdp2" else measured | {"hits": fcdp.ledger(model).hits}


def test_the_imitation_lets_go_of_what_was_exchanged() -> None:
    """Memory that it retained would be counted as the library's."""
    assert alone(exchanged) == [False, False]


def exchanged() -> list[bool]:
    """Whether the output of one gather, and of several at once, outlives it."""
    alive = []
    with fake_world.world(2, 2, DEVICE.type) as topology:
        for outputs in (1, 2):
            whole = torch.zeros(8 * outputs, device=DEVICE)
            parts = [torch.ones(4, device=DEVICE) for _ in range(outputs)]
            exchange.all_gather(whole.chunk(outputs), topology.inter, parts)
            assert (whole == 1).all()
            held = weakref.ref(whole)
            del whole
            alive.append(held() is not None)
    return alive
