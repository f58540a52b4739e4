"""Tasks on shared resources: order, sharing, and what bounds the whole."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.step.tasks import Task, Timeline, simulate


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    resources = st.sampled_from(["compute", "link", "disk"])
    for index in range(draw(st.integers(1, 12))):
        demands = draw(st.dictionaries(resources, st.floats(0, 10), max_size=3))
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        stream = draw(st.sampled_from("abc"))
        latency = draw(st.sampled_from([0.0, 0.25]))
        tasks.append(Task(str(index), stream, demands, tuple(sorted(after)), latency))
    return tasks


def spans(*tasks: Task) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in simulate(tasks).spans]


def test_a_stream_is_one_task_after_another_and_a_resource_is_shared() -> None:
    link, disk = {"link": 2}, {"disk": 1}
    assert spans(Task("a", "s", link), Task("b", "s", disk)) == [(0, 2), (2, 3)]
    assert spans(Task("a", "s", link), Task("b", "t", disk)) == [(0, 2), (0, 1)]
    assert spans(Task("a", "s", link), Task("b", "t", {"link": 1})) == [(0, 3), (0, 2)]
    nothing = Task("a", "s", {}), Task("b", "s", {"link": 0}), Task("c", "t", {}, (1,))
    assert spans(*nothing) == [(0, 0)] * 3
    # Latency takes no resource.
    late = Task("a", "s", {"link": 1}, latency_seconds=1)
    assert spans(late, Task("b", "t", {"link": 1})) == [(0, 2), (0, 1)]
    # Alone the exchange takes half of PCIe; with the copy both run at two thirds.
    exchange, copy = Task("a", "s", {"link": 4, "pcie": 2}), Task("b", "t", {"pcie": 3})
    assert [end for _, end in spans(exchange, copy)] == pytest.approx([5.5, 4.5])


def test_dependencies_and_the_critical_path() -> None:
    timeline = simulate(
        [
            Task("short", "s", {"link": 1}),
            Task("long", "t", {"disk": 5}),
            Task("last", "s", {"link": 1}, after=(1,)),
        ]
    )
    assert [timeline.tasks[index].name for index in timeline.critical_path] == ["long", "last"]
    assert timeline.seconds == 6
    assert timeline.busy_seconds() == {"link": 2, "disk": 5}


@given(task_lists())
def test_any_tasks(tasks: list[Task]) -> None:
    """One set of examples serves all checks: generating them takes longest."""
    timeline = simulate(tasks)
    _check_order_and_bounds(tasks, timeline)
    _check_that_the_critical_path_has_no_gap(timeline)
    assert timeline.spans == simulate(tasks).spans, "it is not deterministic"


@given(task_lists(), task_lists())
def test_tasks_that_share_nothing_do_not_wait_for_one_another(
    ours: list[Task], theirs: list[Task]
) -> None:
    """Both lists together take as long as each alone, whatever else goes on."""
    theirs_apart = [
        task._replace(
            stream=f"their {task.stream}",
            demands={f"their {of}": seconds for of, seconds in task.demands.items()},
            after=tuple(len(ours) + earlier for earlier in task.after),
        )
        for task in theirs
    ]
    together = simulate([*ours, *theirs_apart]).spans
    for span, alone in zip(together, simulate(ours).spans + simulate(theirs).spans, strict=True):
        assert span == pytest.approx(alone, rel=1e-6, abs=1e-9)


def _check_order_and_bounds(tasks: list[Task], timeline: Timeline) -> None:
    for index, (task, span) in enumerate(zip(tasks, timeline.spans, strict=True)):
        assert all(timeline.spans[earlier].end <= span.start + 1e-9 for earlier in task.after)
        same = [other for other in range(index) if tasks[other].stream == task.stream]
        assert all(timeline.spans[earlier].end <= span.start + 1e-9 for earlier in same)
        alone = task.latency_seconds + max(task.demands.values(), default=0.0)
        assert span.end - span.start >= alone * (1 - 1e-6) - 1e-9
    # No resource does more than a second's work a second, and something is always going on.
    assert all(
        seconds <= timeline.seconds * (1 + 1e-6) + 1e-9
        for seconds in timeline.busy_seconds().values()
    )
    assert (
        timeline.seconds
        <= sum(task.latency_seconds for task in tasks)
        + sum(sum(task.demands.values()) for task in tasks) * (1 + 1e-6)
        + 1e-9
    )


def _check_that_the_critical_path_has_no_gap(timeline: Timeline) -> None:
    path = timeline.critical_path
    assert timeline.spans[path[0]].start == 0
    assert timeline.spans[path[-1]].end == timeline.seconds
    for earlier, later in itertools.pairwise(path):
        assert timeline.spans[earlier].end == timeline.spans[later].start
