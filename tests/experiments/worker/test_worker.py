"""Real cells on an emulated cluster: what crosses between nodes, what is learnt, how ranks fail.

Bytes are the kernel's: what the busiest node's interface has sent, headers and the ranks' own
messages included.
"""

import gzip
import json
import os
import resource
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from pyroute2 import netns

from experiments.clusters import namespaces
from experiments.clusters.emulated import EmulatedCluster
from experiments.commands.kinds import PRELOADED
from experiments.records.objective import GRPO
from experiments.records.workload import OwnModel
from experiments.worker.worker import FOLDER, SUMMARY, forget_peaks
from tests.experiments import cells, operators
from tests.experiments.cells import (
    FAILING_WORKER,
    NODES,
    RANKS_PER_NODE,
    Runner,
    check_failed,
    model_spec,
    payload,
)

ZERO3 = ("deepspeed-zero3", "fsdp2")
STRATEGIES = (*ZERO3, "fcdp")
#: Held-out examples are six micro-batches, for each of which parameters would be gathered.
LORA = {"tuning": "lora", "held_out": 6}
ACCUMULATION_4 = {"accumulation": 4, "steps": 2}

#: Bytes that FCDP sends per step and node beside its payload, however large the model: the
#: ranks' decision which units are stale, acknowledgements, headers, and the two barriers around
#: the measured steps. Measured on four blocks: 8 to 11 kB a step.
FIXED_BYTES = 16_000


@pytest.fixture(scope="module")
def cluster(privileged: None, fork_server: None) -> Iterator[EmulatedCluster]:
    operators.build("current")
    preload = [*PRELOADED, "deepspeed", "experiments.worker.worker"]
    with EmulatedCluster(cells.CLUSTER, preload) as built:
        yield built


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: EmulatedCluster) -> Iterator[None]:
    """After every test, no process is left in any node."""
    yield
    names = [name for name in netns.listnetns() if f"-{os.getpid()}-" in name]
    assert len(names) == NODES + 1
    assert [namespaces.processes(name) for name in names] == [[]] * len(names)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("strategy", "how", "rank"),
    [
        ("fcdp", "SIGKILL", 2),
        ("deepspeed-zero3", "raise", 3),
        ("pipeline", "SIGKILL", 2),
        ("pipeline", "raise", 3),
    ],
)
def test_a_rank_that_fails_in_mid_step_ends_the_cell(
    run: Runner, strategy: str, how: str, rank: int
) -> None:
    """First in this file: other tests of the same cells must not suffer from it."""
    # The step before it was whole, and the one that it failed in was not. A pipeline's first has
    # two backwards of one stage.
    whole = check_failed(run(strategy, FAILING_WORKER, how, f"{rank}"), how, rank)
    assert whole == ([] if strategy == "pipeline" else [1])
    again = run(strategy).measurement.losses
    assert again == pytest.approx(run("fsdp2").measurement.losses, rel=1e-5)


def test_lora_saves_fcdp_what_it_does_not_save_zero3(run: Runner) -> None:
    saved = {name: run(name).sent / run(name, **LORA).sent for name in STRATEGIES}
    assert saved["fcdp"] > 20
    assert saved["fsdp2"] < 4
    assert saved["deepspeed-zero3"] < 4


@pytest.mark.parametrize(
    ("settings", "describes", "off"),
    [
        ({"policy": "none", **LORA}, "none", 0.0),
        ({"exchanges": "flat"}, "host, flat exchanges", 1e-5),
        (
            {"gather_codec": "int8", "reduce_codec": "int4", "error_feedback": True},
            "host, gather int8, reduce int4 with error feedback",
            0.05,
        ),
    ],
)
def test_each_choice_sends_what_its_closed_form_says(
    run: Runner, settings: dict[str, Any], describes: str, off: float
) -> None:
    """And learns the same, bit for bit where nothing is rounded or summed otherwise."""
    finished = run("fcdp", **settings)
    plain = run("fcdp", **(LORA if LORA.items() <= settings.items() else {}))
    least = finished.measurement.inter_node_bytes_closed_form
    assert least <= finished.sent <= 1.05 * least + FIXED_BYTES
    assert finished.measurement.policy == describes
    expected = pytest.approx(plain.measurement.losses, rel=off, abs=0)
    assert finished.measurement.losses == expected


@pytest.mark.parametrize(
    "settings", [{}, LORA, ACCUMULATION_4], ids=["full", "lora", "accumulation"]
)
def test_all_strategies_learn_the_same(run: Runner, settings: dict[str, Any]) -> None:
    fcdp = run("fcdp", **settings)
    losses, held_out = fcdp.measurement.losses, fcdp.measurement.held_out_loss
    assert len(losses) == fcdp.cell.warmup_steps + fcdp.cell.steps
    # Four steps of LoRA, which starts with B = 0, move the loss by less than batches differ.
    assert settings is LORA or losses[-1] < losses[0]
    for strategy in ZERO3:
        theirs = run(strategy, **settings).measurement
        assert losses == pytest.approx(theirs.losses, rel=1e-5)
        if settings is LORA:
            assert held_out == pytest.approx(theirs.held_out_loss, rel=1e-5)
            assert losses[-1] - 0.5 < held_out < losses[0] + 0.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_measurement_says(run: Runner, strategy: str) -> None:
    finished = run(strategy)
    measured = finished.measurement
    assert measured.engine == strategy.partition("-")[0]
    assert measured.engine_version
    assert len(measured.step_seconds) == finished.cell.steps
    assert 0 < sum(measured.step_seconds) < finished.seconds
    assert finished.sent >= measured.inter_node_bytes_closed_form
    assert 50e6 < measured.peak_host_bytes < 4e9
    assert measured.peak_device_bytes is None
    caches = strategy == "fcdp"
    assert (measured.ledger_bytes_per_step is not None) == caches
    assert (measured.cache is not None) == caches
    if caches:
        cache, blocks = measured.cache, 2
        # The root stays gathered until its backward: nothing would read an entry of it.
        assert cache.entries == {"host": blocks}
        assert (cache.hits_per_step, cache.misses_per_step) == (blocks, blocks + 1)
        assert 0 < cache.entry_bytes["host"] <= cache.host_bytes == measured.host_cache_bytes
    assert set(measured.phase_seconds) == {"forward", "backward", "optimizer"}
    mean = fmean(measured.step_seconds)
    assert 0.5 * mean < sum(measured.phase_seconds.values()) <= mean
    assert measured.held_out_loss is None


def test_a_users_own_model_and_loss_train_alike(run: Runner) -> None:
    settings = {
        "model": OwnModel(name="mine", function="tests.experiments.own_model:build"),
        "loss": "tests.experiments.own_model:loss",
        "held_out": 2,
    }
    fcdp, fsdp2 = (run(strategy, **settings).measurement for strategy in ("fcdp", "fsdp2"))
    assert fcdp.parameters == 2 * 256 * 16 + 256 + 2 * (16 * 16 + 16)
    assert fcdp.losses == pytest.approx(fsdp2.losses, rel=1e-5)
    assert fcdp.losses[-1] < fcdp.losses[0]
    assert fcdp.held_out_loss == pytest.approx(fsdp2.held_out_loss, rel=1e-5)


def test_an_iteration_says_what_each_phase_sends(run: Runner) -> None:
    """Generation by FCDP is one gather and messages of a few bytes, whatever FSDP2 gathers."""
    answers = GRPO(kind="grpo", new_tokens=16, group=2)
    settings = {"objective": answers, "micro_batch": 2, "accumulation": 2, "steps": 2}
    fcdp, fsdp2, once = (
        run(strategy, **settings, **extra)
        for strategy, extra in (("fcdp", {}), ("fsdp2", {}), ("fsdp2", {"forwards": "unsharded"}))
    )
    half = payload(fcdp) / 2
    generated = {}
    for name, finished in (("fcdp", fcdp), ("fsdp2", fsdp2), ("once", once)):
        measured = finished.measurement
        generated[name] = measured.generation_bytes
        in_all = measured.generation_bytes + measured.scoring_bytes + measured.update_bytes
        assert in_all == pytest.approx(finished.sent, rel=0.02)
        seconds = measured.generation_seconds + measured.scoring_seconds + measured.update_seconds
        assert seconds == pytest.approx(fmean(measured.step_seconds), rel=0.2)
        assert measured.inter_node_bytes_closed_form is None
        assert len(measured.rewards) == finished.cell.warmup_steps + finished.cell.steps
    assert half <= generated["fcdp"] <= 1.05 * half + 2 * FIXED_BYTES
    assert fcdp.measurement.scoring_bytes <= FIXED_BYTES
    assert half <= fcdp.measurement.update_bytes <= 1.05 * half + 2 * FIXED_BYTES
    assert generated["fsdp2"] > 10 * generated["fcdp"]
    # All blocks once; the embeddings stay gathered either way.
    assert half <= generated["once"] <= 2 * half


def test_memory_that_building_took_is_in_no_peak() -> None:
    block = b"a" * 2**29
    assert peak() > len(block)
    del block
    forget_peaks(torch.device("cpu"))
    taken = peak() - psutil.Process().memory_info().rss
    assert taken < 2**28, "/proc/self/clear_refs has no effect here"


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_profiled_step_leaves_a_trace_of_each_rank_and_a_summary(run: Runner) -> None:
    finished = run("fcdp", profile=True)
    folder = finished.directory / FOLDER
    traces = [f"rank{rank}.json.gz" for rank in range(NODES * RANKS_PER_NODE)]
    assert sorted(os.listdir(folder)) == sorted([SUMMARY, *traces])
    for trace in traces:
        events = json.loads(gzip.decompress((folder / trace).read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        units = {"fcdp::gather_inter transformer.h.0", "fcdp::reduce_inter transformer.h.1"}
        assert units <= names
    lines = (folder / SUMMARY).read_text().splitlines()
    rows = {cells[1].strip(): cells[2:] for line in lines if len(cells := line.split("|")) > 4}
    # Three units, each gathered across nodes once and inside the node in forward and backward,
    # but for the root, which stays gathered.
    assert float(rows["fcdp::gather_inter"][0]) == 3
    assert float(rows["fcdp::gather_intra"][0]) == 5
    assert float(rows["fcdp::reduce_inter"][0]) == 3
    assert float(rows["fcdp::gather_inter"][1]) <= float(rows["fcdp::gather_inter"][2])
    (sent,) = (line.split()[3] for line in lines if "to other nodes, by the kernel's" in line)
    assert float(sent) * 1e6 == pytest.approx(finished.sent, rel=0.05)
    crossed = finished.measurement.ledger_bytes_per_step["inter_node"]["forward"] / 1e6
    assert f"| inter node | forward | {crossed:.3f} |" in lines


def test_a_cycle_sends_its_closed_form_and_learns_as_in_synchrony(run: Runner) -> None:
    four = {"model": model_spec("gpt2", layers=4)}
    together = run("cyclic", **four).measurement.losses
    for form in ("cyclic-ring", "cyclic-zero"):
        finished = run(form, **four)
        least = finished.measurement.inter_node_bytes_closed_form
        assert least <= finished.sent <= 1.05 * least + FIXED_BYTES
        assert finished.measurement.losses == pytest.approx(together, rel=1e-4)
        assert len(finished.measurement.bytes_by_slot) == 2 * NODES * RANKS_PER_NODE
