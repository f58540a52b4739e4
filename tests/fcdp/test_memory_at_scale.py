"""Device memory of a real step of 10B and 30B models on 32 ranks, under fake tensors.

The step is FSDP2's and this library's own code; tensors have shapes and no contents, and the
process group sends nothing. The CPU stands for the device, so host memory is kept out of the count.
The suite runs two layers of the smaller model, ``pytest --exhaustive`` all of them (minutes).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp
from fcdp.engine import engine_of
from fcdp.reduce_scatter import HierarchicalReduceScatter
from simulation.models import PAPER_MODELS
from tests.ranks import Pools

pytestmark = pytest.mark.ranks

NODES, RANKS_PER_NODE = 4, 8
#: Layers and width of those of the paper.
MODELS = {
    size: (PAPER_MODELS[name].layers, PAPER_MODELS[name].width)
    for size, name in (("10B", "gpt-10b"), ("30B", "gpt-30b"))
}
#: Few, so that parameters and not activations make the peak.
TOKENS = 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class HostArena:
    """Host memory, which is not what is measured."""

    def __init__(self, nbytes: int, device: torch.device, *, poison: bool = False) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def take(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


class Sums:
    """Reductions without what gloo's messages are received into: no accelerator's need that."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self) -> None:
        pass


class MetaCopies:
    """Copies between the device and the arena: their source or target takes no device memory."""

    def __init__(self, stored: torch.Tensor, given: Any, node: int) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.pairs)


@contextmanager
def imitated_host() -> Iterator[None]:
    with (
        mock.patch("fcdp.cache.tiers.host.Arena", HostArena),
        mock.patch("fcdp.cache.tiers.host.runs", MetaCopies),
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=2**40),
        mock.patch("fcdp.exchange._SwapAndAdd", Sums),
        # On an accelerator its streams overlap, within FSDP2's limit of buffers.
        mock.patch.object(HierarchicalReduceScatter, "_goes_on", return_value=False),
        mock.patch("fcdp.agreement.any_rank", side_effect=lambda flags, _: list(flags)),
        mock.patch("fcdp.cache.cache.any_rank", side_effect=lambda flags, _: list(flags)),
        mock.patch("fcdp.staleness.any_rank", side_effect=lambda flags, _: list(flags)),
    ):
        yield


def peak_bytes(layers: int, width: int, policy: fcdp.CachePolicy | None) -> list[int]:
    """One of 32 ranks' peak of a step, largest slice of a unit, and all slices, in bytes.

    Without a policy, FSDP2's.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NODES * RANKS_PER_NODE)
    topology = fcdp.Topology.build(NODES, RANKS_PER_NODE, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), imitated_host():
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=width, n_layer=layers, n_head=32, n_positions=TOKENS, vocab_size=257)
        )
        blocks = list(model.transformer.h)
        for module in [*blocks, model]:
            fully_shard(module, mesh=topology.mesh, mp_policy=BF16)
        if policy is not None:
            # Without checksums: of no contents there are none to compare.
            fcdp.cache_parameters(model, topology, policy, detect_writes=False)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = FSDPMemTracker(model, optimizer)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        with tracker:
            for step in range(2):
                model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        if policy is None:
            return [peak]
        slices = [NODES * unit.shard_bytes for unit in engine_of(model).units]
        return [peak, max(slices), sum(slices)]


@pytest.mark.parametrize("size", MODELS)
def test_the_host_cache_costs_at_most_one_slice_of_device_memory(
    size: str, request: pytest.FixtureRequest
) -> None:
    layers, width = MODELS[size]
    if not request.config.getoption("--exhaustive"):
        if size != "10B":
            pytest.skip("wider blocks: runs with --exhaustive")
        layers = 2
    pools = Pools()  # a process of its own: the fake group takes the place of the real one
    try:
        # The tracker counts too much where it meets a shape for the first time in a process.
        pools.run(1, peak_bytes, layers, width, None)
        (plain,) = pools.run(1, peak_bytes, layers, width, None)[0]
        cached, largest, _ = pools.run(1, peak_bytes, layers, width, fcdp.HostCache())[0]
        on_device, _, everything = pools.run(1, peak_bytes, layers, width, fcdp.DeviceCache())[0]
    finally:
        pools.close()
    assert cached <= plain + largest
    # The count does see what a cache takes.
    assert on_device > plain + everything * (NODES - 1) / NODES / 2
