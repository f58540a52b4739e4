"""Ranks two slots apart and micro-batches that take turns: bytes, slots, what a step waits for."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baselines.cyclic import routes
from experiments.records.modelled import workload_of
from simulation.cycle import cycle_of, stages_of
from simulation.emulated import emulated
from simulation.hardware import Hardware
from simulation.prediction import predict
from simulation.step.schedule import StageSeconds
from simulation.step.slots import in_slot
from simulation.workload import FP32, Workload
from tests.experiments.cells import cell, model_spec
from tests.simulation.workloads import hardware, paper_cluster, predicted, workload

FORMS = ("cyclic-ring", "cyclic-zero")
#: Nothing takes time but computation.
FREE: dict[str, Any] = {
    "inter_bytes_per_s": float("inf"),
    "intra_bytes_per_s": float("inf"),
    "host_to_device_bytes_per_s": float("inf"),
    "device_to_host_bytes_per_s": float("inf"),
    "inter_latency_seconds": 0.0,
    "intra_latency_seconds": 0.0,
}
COUNTS = st.integers(1, 12)


def of(strategy: str, *, layers: int = 8, **more: Any) -> Workload:
    model = model_spec("gpt2", layers=layers)
    given_cell = cell(strategy, model=model, dtype="bfloat16", sequence_length=128, micro_batch=8)
    return replace(workload_of(given_cell), **more)


def gpus(nodes: int = 4, ranks_per_node: int = 1, **more: Any) -> Hardware:
    return replace(paper_cluster(nodes), ranks_per_node=ranks_per_node, **more)


def own_seconds(workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """Seconds that a rank computes in a step; of the update of a stage, at most."""
    seconds = StageSeconds.of(workload, stages_of(workload, hardware.world_size), hardware)
    return sum(seconds.forward) + sum(seconds.backward), max(seconds.update)


@settings(max_examples=20)
@given(
    st.sampled_from(FORMS),
    st.sampled_from(["v1", "v2"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.floats(1e6, 1e11),
    st.booleans(),
)
# A message from the same node, of the step before, is received once.
@example("cyclic-ring", "v1", 1, 2, 2, 1e6, False)
# Two messages that a slot waits for arrive at the same moment.
@example("cyclic-zero", "v2", 3, 2, 3, 1e6, False)
def test_a_step_is_as_long_as_its_resources_need_and_sends_the_closed_form(
    strategy: str,
    rule: Literal["v1", "v2"],
    nodes: int,
    ranks: int,
    stages: int,
    bits_per_s: float,
    on_one_host: bool,
) -> None:
    world = nodes * ranks
    workload = of(strategy, layers=6, rule=rule, stages=min(stages, world))
    hardware: Hardware
    if on_one_host:
        workload = replace(workload, element_bytes=4)
        hardware = emulated(nodes, ranks, bits_per_s)
    else:
        hardware = gpus(nodes, ranks, inter_bytes_per_s=bits_per_s / 8)
    prediction = predict(workload, hardware)
    cut = stages_of(workload, world)
    cycle = cycle_of(workload, cut, world)
    sent = routes.crossing(cycle, cut.sizes(twice=cycle.twice), ranks, nodes)
    assert prediction.inter_node_bytes == 4 * sent
    computed, _ = own_seconds(workload, hardware)
    # A step repeats but for messages that overtake one another.
    assert prediction.step_seconds >= 0.97 * computed
    assert max(prediction.busy.values()) <= 1.03
    path = prediction.timeline.critical_path
    assert prediction.timeline.spans[path[0]].start == 0
    assert prediction.timeline.spans[path[-1]].end == prediction.step_seconds


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_messages_that_are_slow_to_come_are_passed_on_by_all_ranks_in_a_step(ranks: int) -> None:
    """The sum of a stage's gradients, and its parameters, go round all ranks once per version.

    Where a rank needs two messages at a time, one of them waits until it can receive it.
    """
    latency = 1.0
    hardware = gpus(ranks, **FREE | {"inter_latency_seconds": latency})
    prediction = predict(of("cyclic-ring"), hardware)
    computed, _ = own_seconds(of("cyclic-ring"), hardware)
    assert computed < 0.1 * latency
    assert ranks * latency <= prediction.step_seconds <= (ranks + 0.5) * latency + 2 * computed


def test_a_ring_hides_what_ddp_sends_at_once() -> None:
    """Bytes that take as long as half of the computation cost nothing if spread over slots."""
    workload = of("cyclic-ring")
    computed, update = own_seconds(workload, gpus(8))
    sent = predict(workload, gpus(8)).inter_node_bytes
    hardware = gpus(8, **FREE | {"inter_bytes_per_s": sent / (0.5 * computed)})
    prediction = predict(workload, hardware)
    assert prediction.busy["inter_node"] > 0.4
    assert prediction.step_seconds <= 1.1 * (computed + 2 * update)


@given(COUNTS, st.data())
def test_as_many_stages_are_live_in_every_slot(micro_batches: int, data: st.DataObject) -> None:
    """Their number is the paper's N (N + 1) / 2, forwards before backwards."""
    stages = data.draw(st.integers(1, micro_batches))
    for slot in range(2 * micro_batches):
        phases = [phase for _, phase in in_slot(slot, stages, micro_batches)]
        activations = sum(phase + 1 if phase < stages else 2 * stages - phase for phase in phases)
        assert activations == stages * (stages + 1) // 2


def test_a_step_computes_what_ddp_does_and_reduces_each_stage_once() -> None:
    turns, ddp = (
        predicted(name, accumulation=4, on=hardware(1e15)) for name in ("cyclic-interleaved", "ddp")
    )
    assert turns.inter_node_bytes == pytest.approx(2 * ddp.inter_node_bytes)  # fp32, not bf16
    computed = turns.timeline.busy_seconds()["compute"]
    assert computed == pytest.approx(ddp.timeline.busy_seconds()["compute"], rel=0.05)


def test_gradients_of_micro_batches_that_take_turns_are_added_up() -> None:
    of, on = workload("cyclic-interleaved", accumulation=4), hardware()
    tasks = predict(of, on).timeline.tasks
    seconds = sum(t.demands["compute"] for t in tasks if t.name.startswith("backward"))
    added = seconds - 4 * sum(StageSeconds.of(of, stages_of(of, on.world_size), on).backward)
    assert added == pytest.approx(4 * 3 * FP32 * of.trained / on.rates.copied_bytes_per_s)


RANKS = 4
ON = (hardware(), emulated(2, 2, None))


@given(st.integers(1, RANKS), st.sampled_from(ON), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_stages_together_take_what_a_step_of_ddp_does(
    stages: int, on: Hardware, recomputed: float, lora: bool
) -> None:
    of = workload("cyclic-ring", stages=stages, recomputed=recomputed, lora=lora)
    times = StageSeconds.of(of, stages_of(of, RANKS), on)
    assert len(times.forward) == len(times.backward) == len(times.update) == stages
    timeline = predict(replace(of, strategy="ddp"), on).timeline
    for phase, seconds in (("forward", times.forward), ("backward", times.backward)):
        names = [i for i, task in enumerate(timeline.tasks) if task.name.startswith(phase)]
        computed = sum(timeline.tasks[i].demands["compute"] for i in names)
        assert sum(seconds) == pytest.approx(computed)
    steps = ("optimizer", "calls")
    updated = sum(task.demands.get("compute", 0.0) for task in timeline.tasks if task.name in steps)
    assert sum(times.update) == pytest.approx(updated)
