"""The reference that variants of one strategy are ranked against, and their share of the peak."""

import pytest

from experiments.records.comparison import reference
from experiments.records.modelled import workload_of
from experiments.terminal.variants_table import ranked
from simulation.hardware import gpu
from simulation.workload import token_work
from tests.experiments.stand_in import cell, record


def test_the_reference_is_what_caches_least_of_those_that_ran() -> None:
    zero3, usual = record(cell(strategy="deepspeed-zero3")), record(cell())
    none, int8 = record(cell(policy="none")), record(cell(gather_codec="int8"))
    failed = record(cell(strategy="deepspeed-zero3"), "failed", "an error")
    assert reference([usual, none, zero3]) == zero3
    assert reference([failed, usual, none]) == none
    assert reference([int8, usual]) == usual
    assert reference([int8]) is None
    assert reference([int8, usual], int8.cell.subject) == int8


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
