"""Pipelines: orders beside PyTorch's, steps beside closed forms, memory by schedule."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _ComputationType

from baselines.pipeline.order import Action, bubble, order
from baselines.settings import PipelineSchedule
from simulation.models import shape
from simulation.pipeline import Pipeline
from simulation.prediction import needed, predict
from simulation.step.pipeline import least_seconds, work_of
from simulation.workload import Workload
from tests.simulation.workloads import hardware, workload

_KINDS: dict[Any, Any] = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "activations",
    _ComputationType.BACKWARD_WEIGHT: "weights",
}
_CLASSES: dict[str, Any] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    "looped": torch_schedules.ScheduleLoopedBFS,
    "zb": torch_schedules.ScheduleInterleavedZeroBubble,
}


def by_torch(
    name: str, group: int, groups: int, per_group: int, micro_batches: int
) -> list[Action]:
    """A group's actions as PyTorch's own class, or ours of PyTorch's, orders them."""
    rounds = max(1, micro_batches // groups)
    fields: dict[str, Any] = {
        "pp_group_size": groups,
        "_num_stages": groups,
        "_n_microbatches": micro_batches,
        "n_local_stages": per_group,
        "microbatches_per_round": micro_batches // rounds,
        "_stages": [None] * per_group,
    }
    made = SimpleNamespace(**fields)
    if name == "ahead":  # our own, of PyTorch's 1F1B
        first = min(2 * (groups - 1 - group), micro_batches)
        rest = [
            (kind, group, at) for at in range(micro_batches) for kind in ("forward", "backward")
        ]
        ahead = [("forward", group, at) for at in range(first)]
        late = [(k, g, at + first * (k == "forward")) for k, g, at in rest]
        return [*ahead, *(of for of in late if of[2] < micro_batches)]  # type: ignore[list-item]
    if name in ("gpipe", "1f1b"):
        actions = _CLASSES[name]._get_pipeline_order(made)[group]
    else:
        actions = _CLASSES[name]._calculate_single_rank_operations(made, group)
    done = [action for action in actions if action and action.computation_type in _KINDS]
    return [(_KINDS[a.computation_type], a.stage_index, a.microbatch_index) for a in done]


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize(
    ("name", "per_group"),
    [("gpipe", 1), ("1f1b", 1), ("ahead", 1), ("interleaved", 2), ("looped", 2), ("zb", 1)],
)
def test_actions_are_in_the_order_of_pytorch(
    name: PipelineSchedule, per_group: int, groups: int, micro_batches: int
) -> None:
    for group in range(groups):
        sizes = group, groups, per_group, micro_batches
        ours, theirs = order(name, *sizes), by_torch(name, *sizes)
        if name == "1f1b":  # which PyTorch lists the last stage's forwards of from the second on
            ours, theirs = ([each[:2] for each in of] for of in (ours, theirs))  # type: ignore[misc]
        assert ours == theirs


def pipeline(name: PipelineSchedule = "ahead", **more: Any) -> Workload:
    several = {"stages_per_node": 2} if name in ("interleaved", "looped") else {}
    settings = {"pipeline_schedule": name, "micro_batch": 1, **several, **more}
    made = workload("pipeline", **settings)
    # Without a head its stages are even.
    return replace(made, model=replace(made.model, vocabulary=1, layers=16))


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("ahead", 1), ("interleaved", 2)]
)
def test_without_a_link_the_bubble_is_the_closed_form(
    name: PipelineSchedule, chunks: int, nodes: int
) -> None:
    made, on = pipeline(name, accumulation=3), hardware(1e15, nodes=nodes, inter_latency_seconds=0)
    on = replace(on, intra_bytes_per_s=1e15, intra_shares_pcie=False, nic_shares_pcie=False)
    tasks = predict(made, on).timeline.tasks
    passes = [t for t in tasks if t.name.startswith(("forward", "backward")) and t.demands]
    computed = sum(t.demands.get("compute 0", 0.0) for t in passes)
    seconds = max(
        span.end
        for task, span in zip(tasks, predict(made, on).timeline.spans, strict=True)
        if task in passes
    )
    rounds = chunks * 3 * nodes
    assert seconds == pytest.approx(computed * (rounds + nodes - 1) / rounds, rel=0.01)
    assert bubble(name, nodes, chunks, 3 * nodes) == pytest.approx(
        (nodes - 1) / (rounds + nodes - 1)
    )


def test_zero_bubble_waits_less_and_several_chunks_send_more() -> None:
    on, slow = hardware(1e15, nodes=4), hardware(1e9, nodes=4)
    plain, zero, chunks = (pipeline(name) for name in ("1f1b", "zb", "interleaved"))  # type: ignore[arg-type]
    assert predict(zero, on).step_seconds < 0.9 * predict(plain, on).step_seconds
    sent = {
        made.pipeline_schedule: predict(made, slow).inter_node_bytes for made in (plain, chunks)
    }
    assert sent["interleaved"] == pytest.approx(2 * sent["1f1b"], rel=0.01)


def test_messages_queue_on_the_link_of_a_node() -> None:
    """An inner node sends two messages of each micro-batch; a link that is slow decides."""
    made, on = pipeline(accumulation=8), hardware(1e8, nodes=4)
    of = Pipeline.of(made, on)
    messages = 2 * of.micro_batches * on.ranks_per_node * of.message_bytes
    predicted = predict(made, on)
    assert predicted.inter_node_bytes == pytest.approx(messages, rel=0.01)
    assert predicted.bottleneck == "inter_node"
    on_link = messages / on.inter_bytes_per_s  # whose messages fill the pipeline first
    assert on_link < predicted.step_seconds < 1.25 * on_link


def test_no_task_of_a_group_waits_for_another_groups_streams_or_resources() -> None:
    made = pipeline(accumulation=4, within_stage="fcdp", nodes_per_stage=2)
    tasks = predict(made, hardware(nodes=4)).timeline.tasks
    ends = {name.rpartition(" ")[2] for each in tasks for name in (each.stream, *each.demands)}
    assert ends == {"0", "1"}
    assert {*"01"} == {each.stream[-1] for each in tasks if each.name.startswith("optimizer")}


@pytest.mark.parametrize(("within", "sharers"), [("sharded", 1), ("fcdp", 8)])
def test_gradients_of_more_micro_batches_are_added_in_each_stage(within: str, sharers: int) -> None:
    made = pipeline(accumulation=2, within_stage=within)
    slow = replace(hardware(nodes=4), rates=replace(hardware().rates, copied_bytes_per_s=1e9))
    first = Pipeline.of(made, slow).stages[0].trained
    more, none = (work_of(Pipeline.of(made, on)).stages[0] for on in (slow, hardware(nodes=4)))
    seconds = [each.passes["backward"].demands["compute"] for each in (more, none)]
    # Eight micro-batches, the first of which has none before it.
    added = 7 / 8 * 3 * 4 * first / sharers / 1e9
    assert seconds[0] - seconds[1] == pytest.approx(added, rel=2e-3)


def test_fcdp_inside_keeps_parameters_and_sums_sharded() -> None:
    """FSDP2 as PyTorch's schedules have it holds a stage whole on each rank, its sums in fp32."""
    on = hardware(nodes=4)
    kept, again, grouped = (
        needed(pipeline(accumulation=2, within_stage=within, nodes_per_stage=nodes), on)
        for within, nodes in (("sharded", 1), ("fcdp", 1), ("fcdp", 2))
    )
    of_stage = Pipeline.of(pipeline(accumulation=2), on).stages[0].parameters
    assert kept.device["gathered"] == 2 * of_stage
    assert kept.device["gradient sums"] == 4 * of_stage
    assert again.device["gradient sums"] == pytest.approx(4 * of_stage / 8, rel=0.01)
    assert again.device["gathered"] < 0.6 * kept.device["gathered"]
    assert not again.host  # a stage on one node gathers from its own ranks
    half = Pipeline.of(pipeline(nodes_per_stage=2), on).stages[0].parameters
    assert grouped.host["cache"] == pytest.approx(2 * half / 2, rel=0.02)


def test_host_memory_is_that_of_the_group_that_needs_most_of_it() -> None:
    """The first one's, which caches the embedding. By zero bubble the last has fuller devices."""
    on = hardware(nodes=4)
    made = pipeline("zb", within_stage="fcdp", nodes_per_stage=2)
    of = Pipeline.of(replace(made, model=shape("llama-3-8b", made.sequence_length)), on)
    first, last = (stage.parameters for stage in of.stages)
    assert first > 1.1 * last
    assert needed(of.workload, on).host["cache"] == pytest.approx(2 * first / 2, rel=0.02)


def test_zero_bubble_gathers_inside_of_nodes_for_both_parts_of_a_backward() -> None:
    plain, zero = (  # of a stage in the middle, whose nodes send most
        predict(
            pipeline(name, accumulation=2, within_stage="fcdp", nodes_per_stage=2),
            hardware(nodes=8),
        ).moved_bytes
        for name in ("ahead", "zb")
    )
    assert zero["inter_node"] == pytest.approx(plain["inter_node"])
    more = zero["intra_node"]["backward"] - plain["intra_node"]["backward"]
    # Forward gathers once more than for each of the 4·2 micro-batches, ahead of the first of them.
    assert more == pytest.approx(8 / 9 * plain["intra_node"]["forward"], rel=0.02)


def test_the_first_stage_computes_all_gradients_at_once_by_zero_bubble() -> None:
    """As PyTorch has it: it hands nothing back, and gathers once."""
    plain, zero = (
        work_of(
            Pipeline.of(pipeline(name, within_stage="fcdp", nodes_per_stage=2), hardware(nodes=4))
        ).stages
        for name in ("ahead", "zb")
    )
    assert zero[0].passes["weights"].demands == plain[0].passes["backward"].demands
    assert not zero[0].passes["activations"].demands
    halves = [zero[1].passes[kind].demands["compute"] for kind in ("activations", "weights")]
    assert min(halves) > 0.3 * plain[1].passes["backward"].demands["compute"]


def test_later_stages_gather_while_their_first_activation_is_under_way() -> None:
    made = pipeline(within_stage="fcdp", nodes_per_stage=2)
    timeline = predict(made, hardware(1e8, nodes=4)).timeline
    spans = {t.name: s for t, s in zip(timeline.tasks, timeline.spans, strict=True)}
    assert spans["gather stage 1"].start == 0
    first, later = (spans[f"forward stage {at} micro-batch 0"] for at in (0, 1))
    assert later.start >= spans["gather stage 1"].end
    assert spans["gather stage 1"].end == pytest.approx(first.end, rel=0.2)  # at the same time


SLOW = settings(max_examples=60)


@SLOW
@given(
    st.sampled_from(["gpipe", "1f1b", "ahead", "interleaved", "looped", "zb"]),
    st.sampled_from([("sharded", 1), ("fcdp", 1), ("fcdp", 2)]),
    st.sampled_from([0.01, 0.1, 1, 10, 100, 1000]),
    st.sampled_from([2, 4, 8]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_no_step_is_shorter_than_the_least(
    name: PipelineSchedule,
    inside: tuple[str, int],
    gbit_s: float,
    nodes: int,
    accumulation: int,
    lora: bool,
    head: bool,
) -> None:
    within, size = inside
    made = pipeline(
        name, within_stage=within, nodes_per_stage=size, accumulation=accumulation, lora=lora
    )
    vocabulary = 30_000 if head else 1
    made = replace(made, model=replace(made.model, vocabulary=vocabulary))
    if nodes == size:
        made = replace(made, stages_per_node=1)
    on = hardware(gbit_s * 1e9, nodes=nodes)
    least = least_seconds(work_of(Pipeline.of(made, on)))
    assert 0 < least <= predict(made, on).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["ahead", "interleaved", "zb"])
@pytest.mark.parametrize("gbit_s", [0.1, 1, 1000])
def test_the_least_is_close_where_one_thing_decides(name: PipelineSchedule, gbit_s: float) -> None:
    made, on = pipeline(name, accumulation=8), hardware(gbit_s * 1e9, nodes=4)
    least = least_seconds(work_of(Pipeline.of(made, on)))
    assert least >= 0.9 * predict(made, on).step_seconds
