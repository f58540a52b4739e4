"""A claim's number is computed from the cells that it names, each with its own partner."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.quantities import LossDifference, Outcome, Ratio, Selection, Value, quantity, taken
from experiments.records import Record
from tests.analysis import made_up

GPT2, LLAMA = made_up.MODELS
SLOW, FAST, _ = made_up.LINKS


def select(**settings: Any) -> Selection:
    return Selection.model_validate(settings)


def speed(record: Record) -> float:
    assert record.tokens_per_s is not None
    return record.tokens_per_s


def made(strategy: str, link: int | None = SLOW, **changes: Any) -> Record:
    return made_up.record(made_up.cell(strategy, GPT2, "full", link, **changes))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ratio", lambda a, b: a / b),
        ("reduction", lambda a, b: 1 - a / b),
        ("gain", lambda a, b: a / b - 1),
    ],
)
def test_a_ratio_pairs_cells_that_differ_in_the_strategy_alone(kind: Any, expected: Any) -> None:
    records = [made(name, link) for link in (SLOW, FAST) for name in ("fsdp2", "fcdp")]
    ratio = Ratio(
        kind=kind,
        quantity="tokens_per_s",
        of=select(strategy="fcdp"),
        over=select(strategy="fsdp2"),
    )

    values = [sample.value for sample in ratio.samples(records)]

    assert values == [
        expected(speed(records[1]), speed(records[0])),
        expected(speed(records[3]), speed(records[2])),
    ]


def test_a_ratio_over_another_link_keeps_the_strategy() -> None:
    records = [made("fsdp2", FAST), made("fcdp", SLOW), made("fcdp", FAST), made("fsdp2", SLOW)]
    ratio = Ratio(
        kind="ratio",
        quantity="tokens_per_s",
        of=select(strategy="fcdp", link="10 Mbit/s"),
        over=select(link="100 Mbit/s"),
    )

    (sample,) = ratio.samples(records)

    assert sample.value == speed(records[1]) / speed(records[2])


def test_cells_of_other_settings_or_evidence_are_no_partners() -> None:
    ratio = Ratio(
        kind="ratio",
        quantity="tokens_per_s",
        of=select(strategy="fcdp"),
        over=select(strategy="fsdp2"),
    )
    simulated = made("fsdp2").model_copy(update={"evidence": "simulated"})

    for other in (made("fsdp2", accumulation=4), made("fsdp2", policy="device"), simulated):
        assert ratio.samples([made("fcdp"), other]) == []
    # How long a cell was run says nothing of what it is.
    assert len(ratio.samples([made("fcdp"), made("fsdp2", steps=1, warmup_steps=1)])) == 1


def test_bytes_of_a_node_and_of_all() -> None:
    record = made("fcdp")
    assert record.measurement is not None
    sent = record.measurement.inter_node_bytes_per_step

    assert quantity(record, "inter_node_bytes") == sent
    assert quantity(record, "all_nodes_bytes") == 2 * sent
    assert quantity(record, "inter_node_bytes_over_least") == pytest.approx(1 / 0.99)
    assert quantity(record, "gather_bytes") == pytest.approx(0.45 * sent)
    assert quantity(record, "backward_gather_bytes") == 0
    assert quantity(record, "all_nodes_forward_bytes") == pytest.approx(2 * 0.45 * sent)
    assert quantity(record, "all_nodes_backward_bytes") == pytest.approx(2 * 0.54 * sent)
    assert quantity(record, "peak_device_bytes") is None
    # Two ranks a node, each with the cache; the model in bfloat16.
    assert quantity(record, "host_cache_share") == pytest.approx(2 * 3.4e6 / (2 * 1.7e6))


def test_what_has_no_ledger_has_no_phases() -> None:
    assert quantity(made("fsdp2"), "gather_bytes") is None
    assert Value(kind="value", quantity="gather_bytes", of=select(strategy="fsdp2")).samples(
        [made("fsdp2")]
    ) == []  # fmt: skip


def test_a_loss_difference_is_the_largest_of_any_step() -> None:
    ours, theirs = made("fcdp"), made("fsdp2")
    assert ours.measurement is not None
    assert theirs.measurement is not None
    changed = ours.measurement.model_copy(update={"losses": [4.0, 2.2, 3.0]})
    other = theirs.measurement.model_copy(update={"losses": [4.0, 2.0, 3.0, 9.0]})
    records = [
        ours.model_copy(update={"measurement": changed}),
        theirs.model_copy(update={"measurement": other}),
    ]

    (sample,) = LossDifference(
        kind="loss_difference", of=select(strategy="fcdp"), over=select(strategy="fsdp2")
    ).samples(records)

    assert sample.value == pytest.approx(0.1)


@pytest.mark.parametrize(("state", "share"), [("oom", 0.5), ("skipped", 1 / 3)])
def test_an_outcome_is_a_share_of_the_cells_that_ran(state: Any, share: float) -> None:
    records = [
        made("fcdp", link).model_copy(update={"state": ended, "measurement": None})
        for link, ended in ((SLOW, "oom"), (FAST, "failed"), (None, "skipped"))
    ]
    outcome = Outcome(kind="outcome", of=select(strategy="fcdp"), state=state)

    samples = outcome.samples(records)

    assert taken(samples, "mean") == pytest.approx(share)


def test_one_number_is_taken_of_several() -> None:
    samples = Value(kind="value", quantity="tokens_per_s", of=select(tuning="full")).samples(
        [made(name) for name in ("fsdp2", "fcdp", "deepspeed-zero3")]
    )
    values = sorted(sample.value for sample in samples)

    assert [taken(samples, take) for take in ("min", "median", "max")] == values
