"""The reference that variants of one strategy are ranked against, and their share of the peak."""

import pytest

from experiments.records.comparison import reference
from experiments.records.modelled import workload_of
from experiments.terminal.variants_table import ranked
from simulation.hardware import gpu
from simulation.workload import token_work
from tests.experiments.stand_in import cell, record


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
