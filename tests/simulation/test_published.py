"""Published steps that no fit has seen: pipelines' refusals and order; what networks reach."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation import calibration, compute, published
from simulation.compute import read_rows, run_of
from simulation.hardware import FABRICS
from simulation.published import seconds
from simulation.step.pipeline import DeepSpeedStages, PassWork, PipelineWork, StageWork
from tests.programs import ROOT
from tests.simulation.workloads import hardware

HELD_OUT = compute.ROWS.with_name("held-out.csv")


def test_passes_that_lack_are_named() -> None:
    steps, passes = published.read()
    other = steps[0].model_copy(update={"micro_batch": 64})
    with pytest.raises(ValueError, match=r"passes\.csv: has none of opt-350m, .*, 2, 64"):
        seconds(other, passes)


def test_mixes_that_are_measured_apart_are_in_order() -> None:
    assert published.orders(published.predicted()) == (15, 15)


def _by_deepspeed(passes: list[tuple[int, int]], batches: int, message: float) -> float:
    """Seconds in which stages run the instructions of DeepSpeed's schedule, each in its turn."""
    pipe = pytest.importorskip("deepspeed.runtime.pipe.schedule", reason="is the oracle")
    count = len(passes)
    clock = [0.0] * count
    came = defaultdict[tuple[str, int], deque[float]](deque)
    left = [deque(chain(*pipe.TrainSchedule(batches, count, at).steps())) for at in range(count)]
    while any(left):
        for at, instructions in enumerate(left):
            while instructions:
                what = instructions[0].name
                if what.startswith("Recv"):
                    if not came[what, at]:
                        break
                    clock[at] = max(clock[at], came[what, at].popleft())
                elif what.startswith("Send"):
                    clock[at] += message
                    to = at + 1 if what == "SendActivation" else at - 1
                    came[what.replace("Send", "Recv"), to].append(clock[at])
                forward, backward = passes[at]
                clock[at] += {"ForwardPass": forward, "BackwardPass": backward}.get(what, 0)
                instructions.popleft()
    return max(clock)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=5),
    st.integers(1, 15),
    st.sampled_from([0.0, 0.5, 3.0, 12.0]),
)
def test_messages_leave_in_the_order_of_deepspeed_s_schedule(
    passes: list[tuple[int, int]], batches: int, message: float
) -> None:
    if batches >= 2 * len(passes):
        batches -= batches % len(passes)  # PyTorch's schedules refuse others
    sends = dict.fromkeys(("forward", "backward"), PassWork({"inter_node": message}))
    stages = []
    for pair in passes:
        forward, backward = (PassWork({"compute": float(seconds)}) for seconds in pair)
        stages.append(StageWork({"forward": forward, "backward": backward}, forward, sends=sends))
    work = PipelineWork(hardware(), "1f1b", len(stages), batches, stages)
    expected = _by_deepspeed(passes, batches, message)
    assert DeepSpeedStages(work).timeline().seconds == pytest.approx(expected)


def test_rows_that_no_fit_sees_are_of_other_sources_and_as_the_page_says() -> None:
    rows = read_rows(HELD_OUT)
    assert not {row.source for row in rows} & {row.source for row in read_rows()}
    check = calibration.errors(rows, compute.read().fitted())
    assert check.median <= 0.08
    assert check.nine_of_ten <= 0.2
    shown = (
        f"{100 * check.median:.1f} % in\nthe median, nine of ten to {100 * check.nine_of_ten:.1f} %"
    )
    assert shown in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_a_row_that_waits_for_its_network_shows_tcp_s_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (of for of in read_rows(HELD_OUT) if of.accumulation == 4)
    fitted = compute.read().fitted()
    assert calibration.errors([row], fitted).worst < 0.2
    limited = compute.run_of(row).hardware
    free = {**FABRICS, "tcp": replace(FABRICS["tcp"], most_bits_per_s=1e15)}
    monkeypatch.setattr("simulation.hardware.FABRICS", free)
    assert run_of(row).hardware.inter_bytes_per_s > 2 * limited.inter_bytes_per_s
    assert calibration.errors([row], fitted).worst > 0.5
