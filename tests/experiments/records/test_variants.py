"""Variants of one strategy are ranked against a stated reference, with what their caches did."""

import pytest

from experiments.records.comparison import reference
from experiments.records.modelled import workload_of
from experiments.records.record import Cached, Machine, Record
from experiments.terminal import variants_table
from experiments.terminal.summary_table import summary
from experiments.terminal.variants_table import ranked
from simulation.hardware import gpu
from simulation.workload import token_work
from tests.experiments.command_line import rendered
from tests.experiments.stand_in import cell, record

_LEDGER = {"inter_node": {"forward": 2e6, "backward": 1e6, "reduce": 3e6}}


def ran(policy: str, seconds: list[float], **held: int) -> Record:
    cache = Cached(
        hits_per_step=4.0 * bool(held),
        misses_per_step=5.0,
        entries=dict.fromkeys(held, 2.0),
        entry_bytes=held,
        device_bytes=held.get("device", 0),
        host_bytes=held.get("host", 0),
    )
    return record(
        cell(policy=policy),
        step_seconds=seconds,
        cache=cache,
        phase_seconds={"forward": 0.4, "backward": 0.5, "optimizer": 0.1},
        ledger_bytes_per_step=_LEDGER,
    )


def comparison() -> list[Record]:
    return [
        ran("none", [1.0, 1.1, 1.2]),
        ran("host", [0.5, 0.5, 0.5], host=1_580_000),
        ran("disk", [1.1, 1.2, 1.3], disk=3_000_000),
        ran("budget(device=1MiB, host=2MiB)", [2.0, 2.0, 2.0], device=790_000, host=1_580_000),
        record(cell(policy="auto"), "failed", "an error"),
    ]


def test_variants_are_ranked_and_those_that_failed_left_out() -> None:
    variants = ranked(comparison())
    assert [variant.name for variant in variants] == [
        "host", "none", "disk", "budget(device=1MiB, host=2MiB)"
    ]  # fmt: skip
    assert {variant.over.cell.subject for variant in variants if variant.over} == {"fcdp none"}
    assert [variant.ratio for variant in variants] == pytest.approx([2.2, 1.0, 1.1 / 1.2, 0.55])
    assert [variant.differs for variant in variants] == [True, False, False, True]


def test_variants_of_strategies_that_choose_a_policy_have_names_of_their_own() -> None:
    cells = [cell(), cell(strategy="fcdp-offload"), cell(strategy="fcdp-offload", policy="disk")]
    names = [variant.name for variant in ranked([*map(record, cells)])]
    assert names == ["host", "fcdp-offload", "fcdp-offload disk"]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([{"policy": "disk"}, {"policy": "none"}, {}], "fcdp none"),
        ([{"gather_codec": "int8"}, {}], "fcdp"),
        ([{"policy": "none"}, {"strategy": "fsdp2"}, {"strategy": "deepspeed-zero3"}],
         "deepspeed-zero3"),
        ([{"strategy": "mics"}, {"strategy": "ddp"}], None),
    ],
)  # fmt: skip
def test_the_reference_is_what_caches_least_of_those_that_ran(
    cells: list[dict[str, str]], expected: str | None
) -> None:
    ran = [record(cell(**of)) for of in cells]
    failed = record(cell(strategy="deepspeed-zero3", seed=1), "failed", "an error")
    baseline = reference([failed, *ran])
    assert (baseline and baseline.cell.subject) == expected
    assert reference(ran, ran[0].cell.subject) == ran[0]


def test_a_row_says_what_the_cache_did() -> None:
    rows = {variant.name: variants_table.row(variant) for variant in ranked(comparison())}
    assert rows["host"]["vs\nno cache"] == "2.20×"
    assert rows["none"]["vs\nno cache"] == "1.00×"
    assert rows["disk"]["vs\nno cache"] == "not sig."  # within the spread
    assert (rows["host"]["hits"], rows["host"]["misses"]) == ("4", "5")
    budget = rows["budget(device=1MiB, host=2MiB)"]
    assert (budget["device\nn: MB"], budget["host\nn: MB"]) == ("2: 0.790", "2: 1.58")
    assert budget["disk\nn: MB"] == "–"
    assert (budget["fwd.\nMbit/s"], budget["bwd.\nMbit/s"]) == ("40", "64")


def test_the_table_fits_a_log_and_is_not_shown_of_older_records() -> None:
    shown = variants_table.table(comparison())
    text = rendered(shown, width=120)
    assert not any("…" in line for line in text)
    assert any(line.startswith("budget(device=1") for line in text)
    assert variants_table.table([record(cell(policy="none")), record(cell())]) is None


def test_the_table_says_that_the_machine_was_busy() -> None:
    quiet, busy = (Machine(load=0.1, cores=2, steal_share=share) for share in (0.0, 0.57))
    records = [each.model_copy(update={"machine": quiet}) for each in comparison()]
    assert not any("busy" in line for line in rendered(summary(records)))
    records[1] = records[1].model_copy(update={"machine": busy})
    (note,) = (line for line in rendered(summary(records), width=200) if "busy" in line)
    assert note == "the machine was busy: 57% of the processors' time taken by its host"


def test_mfu_is_that_of_the_data_sheets_peak() -> None:
    of = cell(dtype="bfloat16")
    ran = {"hardware": {"gpu": "NVIDIA H200"}, "evidence": "measured"}
    on_gpus = record(of, step_seconds=[0.5]).model_copy(update=ran)
    (variant,) = ranked([on_gpus])
    flops = token_work(workload_of(of)).flops * of.tokens_per_step / 0.5
    ranks = of.cluster.nodes * of.cluster.ranks_per_node
    assert variant.mfu == pytest.approx(flops / ranks / gpu("h200").peak_flops)
    one = {"hardware": {"gpu": "NVIDIA H200", "gpus": 1}, "evidence": "emulated"}
    (shared,) = ranked([on_gpus.model_copy(update=one)])
    assert shared.mfu == pytest.approx(flops / gpu("h200").peak_flops)


@pytest.mark.parametrize(
    ("dtype", "hardware"),
    [
        ("bfloat16", {"cpu": "a processor"}),
        ("bfloat16", {"gpu": "NVIDIA A10, NVIDIA H200"}),
        ("float32", {"gpu": "NVIDIA H200"}),
    ],
)
def test_no_mfu_where_no_peak_is_known(dtype: str, hardware: dict[str, str]) -> None:
    ran = {"hardware": hardware, "evidence": "measured"}
    assert ranked([record(cell(dtype=dtype)).model_copy(update=ran)])[0].mfu is None
