"""The tables of the README and other pages, of made-up records."""

from __future__ import annotations

import pytest

from experiments.records.record import Machine
from scripts import readme, tables
from tests.experiments.stand_in import cell, record


def test_each_zero3_has_its_own_bytes() -> None:
    sent = {"deepspeed-zero3": 20e6, "fsdp2": 30e6, "fcdp": 10e6}
    of = {name: record(cell(strategy=name), inter_node_bytes_per_step=sent[name]) for name in sent}
    head, _, row = tables.condensed(list(of.values())).splitlines()
    _, _, without = tables.condensed([of["fsdp2"], of["fcdp"]]).splitlines()
    columns = [name.strip() for name in head.split("|")]
    where = [columns.index(f"{name} MB/step") for name in ("DeepSpeed", "FSDP2", "FCDP")]
    assert [row.split("|")[at].strip() for at in where] == ["20.0", "30.0", "10.0"]
    assert [without.split("|")[at].strip() for at in where] == ["–", "30.0", "10.0"]


def test_what_no_link_explains_is_said_to_be_noise() -> None:
    links = (10_000_000, 100_000_000, None)
    cells = [cell(inter_bandwidth_bits_per_s=link) for link in links]
    usual = [record(of, step_seconds=[s]) for of, s in zip(cells, (3.0, 2.0, 1.0), strict=True)]
    odd = [record(of, step_seconds=[s]) for of, s in zip(cells, (3.0, 1.0, 2.0), strict=True)]
    assert "noise" not in tables.speeds(usual)
    last = tables.speeds(odd).splitlines()[-1]
    assert last.startswith("In 1 of 1 comparisons of links a slower one is faster, by up to 2.0×")


def test_the_result_has_the_rows_of_one_model_on_one_link_over_the_faster_zero3() -> None:
    shown = cell().model.model_copy(update={"name": "gpt2-4x256"})
    link = 100_000_000
    seconds = {"deepspeed-zero3": 4.0, "fsdp2": 6.0, "fcdp": 2.0}
    cells = [
        (name, cell(strategy=name, model=shown, inter_bandwidth_bits_per_s=bits))
        for bits in (link, None)
        for name in seconds
    ]
    rows = [record(of, step_seconds=6 * [seconds[name]]) for name, of in cells]
    _, _, *shown_rows = tables.result(rows).splitlines()
    (columns,) = ([column.strip() for column in row.split("|")] for row in shown_rows)
    assert columns[2:6] == ["4.00", "6.00", "2.00", "2.0×"]


def test_a_machine_is_busy_for_the_reason_that_it_was() -> None:
    """A load alone is one: its host took none of its time."""
    worst = Machine(load=6.4, cores=2, steal_share=0.0)
    assert tables._busy(worst).startswith(
        "The machine was busy, at worst: a load of 6.4 on 2 cores. Times are"
    )


def test_a_frozen_base_has_a_row_per_type() -> None:
    seconds = {("float32", "ddp"): 1.0, ("float32", "fcdp"): 2.0, ("bfloat16", "ddp"): 0.5}
    rows = [
        record(
            cell(strategy=name, frozen_dtype=dtype, tuning="lora", dtype="bfloat16"),
            step_seconds=[took],
        )
        for (dtype, name), took in {**seconds, ("bfloat16", "fcdp"): 0.25}.items()
    ]
    head, _, *shown = tables.by_base(rows).splitlines()
    assert head == "| Base in | ddp | fcdp |"
    assert shown == [
        "| float32 | 1.00 | 2.00 |",
        "| bfloat16 | 0.500 | 0.250 |",
        "",
        "At its peak a rank of DDP takes 1000 MB with float32, 1000 MB with bfloat16.",
    ]


def test_a_page_without_a_place_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md: found 0 places for result, expected 1"):
        readme.rewritten("README.md", "# FCDP\n")
