"""The equations of docs/memory.md beside the bytes that small models allocate and send."""

import os
import re
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import fcdp
from docs import memory
from fcdp.engine import engine_of
from fcdp.grouping import PartialsChoice
from simulation import models
from tests.fcdp.training import Run, Settings, train
from tests.ranks import Pools

README = (Path(memory.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FOLDER = Path(tempfile.gettempdir())
POLICIES: dict[str, fcdp.CachePolicy] = {
    "none": fcdp.NoCache(),
    "device": fcdp.DeviceCache(),
    "host": fcdp.HostCache(),
    "disk": fcdp.DiskCache(FOLDER),
    "never full": fcdp.Threshold(1.0),
    "always full": fcdp.Threshold(0.0),
    "budget": fcdp.Budget(device=1500, host=1500, disk=1500, directory=FOLDER),
    "auto": fcdp.Auto(),
}


def test_the_worked_example() -> None:
    """The page's one sum by hand: 10B in bf16 on 4 × 8."""
    example = memory.EXAMPLES[0]
    units = memory.blocks(example.parameters, example.layers, 2, example.cluster)
    taken = memory.cache(fcdp.HostCache(), units, example.cluster)
    assert taken.host == pytest.approx(3 / 4 * 2 * 9.87e9 / 8, rel=1e-3)
    assert taken.device == 0


def taken(settings: Settings) -> tuple[memory.Memory, memory.Memory]:
    """Bytes that one rank has allocated after two steps, and those of the equations."""
    run = Run(settings)
    for _ in range(2):
        run.step()
    with torch.no_grad():  # which keeps the root too; a step of one micro-batch does not
        run.loss()
    engine = engine_of(run.model)
    disk = engine.cache._disk_tier
    size = 0
    if disk is not None:
        disk._threads.shutdown(wait=True)
        size = os.fstat(disk._file.descriptor).st_size
    allocated = memory.Memory(
        engine.ledger.device_cache_bytes, 0, engine.ledger.host_cache_bytes, size
    )
    closed_form = memory.cache(settings.policy, engine.units, run.topology, settings.look_ahead)
    return allocated, replace(closed_form, slices=0)  # on CPUs they are views of FSDP2's memory


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 1)])
def test_a_rank_takes_what_the_equations_say(
    ranks: Pools, nodes: int, ranks_per_node: int, policy: str
) -> None:
    for adapter_rank, look_ahead in ((0, 1), (3, 2)):
        settings = Settings(
            nodes,
            ranks_per_node,
            adapter_rank=adapter_rank,
            policy=POLICIES[policy],
            look_ahead=look_ahead,
        )
        for allocated, expected in ranks.run(settings.world_size, taken, settings):
            if policy in ("auto", "always full"):
                assert allocated.device <= expected.device
                expected = replace(expected, device=allocated.device)
            assert allocated == expected
            assert (expected != memory.Memory(0, 0, 0, 0)) == (policy != "none")


def waiting(settings: Settings, place: PartialsChoice) -> list[tuple[int, int]]:
    """Bytes of checksums, guard and partial gradients on one rank, each with its equation."""
    run = Run(replace(settings, partial_gradients=place, verify=True))
    topology = run.topology
    with fcdp.accumulate(run.model, last=False):
        run.loss().backward()
    engine, counts = engine_of(run.model), fcdp.ledger(run.model)
    held = counts.peak_pending_bytes + counts.host_partials_bytes
    guard = engine.staleness._guard
    checksums = [entry.checksums for entry in engine.entries.values()]
    return [
        (
            sum(tensor.nbytes for tensor in checksums if tensor is not None),
            memory.checksums(engine.units, topology.nodes),
        ),
        (
            sum(tensor.nbytes for tensor in (guard._sums, guard._differ)),
            memory.guard(engine.units, topology.nodes),
        ),
        (held, memory.partials(engine.units, topology.nodes, place)),
    ]


@pytest.mark.parametrize("place", ["auto", "device", "host", "each"])
def test_partial_gradients_and_checksums(ranks: Pools, place: PartialsChoice) -> None:
    for adapter_rank, dtype in product((0, 3), (None, torch.bfloat16)):
        settings = Settings(adapter_rank=adapter_rank, param_dtype=dtype)
        for pairs in ranks.run(4, waiting, settings, place):
            for held, closed_form in pairs:
                assert held == closed_form
            assert [held > 0 for held, _ in pairs] == [True, True, place != "each"]


def residual_bytes(settings: Settings) -> tuple[int, int, int]:
    """Bytes that error feedback keeps after a step, their equation, and the bytes after a load."""
    run = Run(settings)
    for _ in range(2):
        run.loss().backward()
    held = fcdp.ledger(run.model).residual_bytes
    run.model.load_state_dict(run.model.state_dict())
    closed_form = memory.residuals(engine_of(run.model).units, settings.nodes)
    return held, closed_form, fcdp.ledger(run.model).residual_bytes


@pytest.mark.parametrize("adapter_rank", [0, 3])
def test_residuals(ranks: Pools, adapter_rank: int) -> None:
    settings = Settings(
        adapter_rank=adapter_rank, reduce_codec=fcdp.BlockInt8(16), error_feedback=True
    )
    for held, closed_form, left in ranks.run(4, residual_bytes, settings):
        assert held == closed_form > 0
        assert left == 0


def gathered_and_trained(settings: Settings) -> tuple[int, int]:
    units = engine_of(Run(settings).model).units
    sizes = [(unit.shard_bytes * settings.world_size, unit.trainable) for unit in units]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@pytest.mark.parametrize("adapter_rank", [0, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_between_nodes(ranks: Pools, adapter_rank: int, accumulation: int) -> None:
    """Compares the second step: the first also gathers frozen parameters."""
    settings = Settings(
        adapter_rank=adapter_rank, accumulation=accumulation, reshard_after_forward=True
    )

    def of_the_second_step(settings: Settings) -> float:
        first, both = (
            ranks.run(4, train, replace(settings, steps=steps), "fcdp")[0].ledger["inter_node"]
            for steps in (1, 2)
        )
        return settings.ranks_per_node * (sum(both.values()) - sum(first.values()))

    gathered, trained = ranks.run(4, gathered_and_trained, settings)[0]
    zero3, here = memory.traffic(gathered, trained, settings.nodes, accumulation)
    assert of_the_second_step(settings) == here
    if accumulation == 1:  # without a cache gradients still cross only once
        assert of_the_second_step(replace(settings, policy=fcdp.NoCache())) == zero3


def test_a_pipeline_sends_as_much_at_the_tokens_of_the_readme() -> None:
    """Bytes of both at T*, and README's figures on four nodes."""
    for name, words in (("mistral-7b", "7B"), ("gpt-30b", "30B"), ("llama-3-70b", "70B")):
        model = models.shape(name, 512)
        tokens = memory.equal_tokens(model.parameters, model.width, nodes=4)
        assert re.search(f"{tokens / 1e6:.1f} M for {words}\\b", README)
        _, fcdp = memory.traffic(2 * model.parameters, 2 * model.parameters, nodes=4)
        p, d = model.parameters, model.width
        inner_stage = 2 * (2 * d * tokens)  # two neighbours, two bytes per element
        assert inner_stage == pytest.approx(fcdp)
        alone = (memory.pipeline_traffic(p, d, 4, tokens, per_stage=r) for r in (4, 1))
        assert [*alone] == pytest.approx([fcdp, fcdp])
        groups = memory.pipeline_traffic(p, d, 4, tokens, per_stage=2)
        assert groups == pytest.approx(7 / 12 * fcdp)
    one_neighbour = memory.equal_tokens(1e9, 1000, nodes=2)
    assert one_neighbour == pytest.approx(1e9 / 1000)
