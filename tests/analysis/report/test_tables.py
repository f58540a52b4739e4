import pandas as pd
import pytest

from analysis import text
from analysis.claims.computations import Selection, Value
from analysis.compare.baseline import compare
from analysis.load.rows import row
from analysis.load.table import frame
from analysis.report import tables
from experiments.records.record import METRICS
from experiments.records.workload import OwnModel
from tests.analysis import made_up


def test_every_cell_that_ran_has_a_row_with_its_evidence_and_state(compared: pd.DataFrame) -> None:
    shown = tables.presentable(compared)
    assert len(shown) == (compared["state"] != "skipped").sum()
    assert set(shown["Evidence"]) == {"emulated"}
    failed = shown[shown["State"] == "failed"].iloc[0]
    assert failed["s/step"] == failed["MB sent/step"] == text.ABSENT


def test_markdown_fields_cannot_break_the_table() -> None:
    table = text.markdown(pd.DataFrame({"Model": ["a|b\nc"]}))
    assert table.splitlines()[2] == "| a\\|b c |"


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_a_column_where_there_is_one_and_a_quantity_of_claims(
    compared: pd.DataFrame, name: str
) -> None:
    record = made_up.record(made_up.cell("fcdp"), **{name: 0.25})
    title = METRICS[name].title
    assert list(tables.presentable(compare([record]))[title]) == [METRICS[name].written(0.25)]
    assert title not in tables.presentable(compared)
    asked = Value(kind="value", quantity=name, of=Selection(strategy="fcdp"))
    assert [sample.value for sample in asked.samples([row(record)])] == [0.25]
    with pytest.raises(ValueError, match=f"'{name}s' is no quantity; allowed are "):
        Value(kind="value", quantity=f"{name}s", of=Selection(strategy="fcdp"))


def test_cells_of_users_models_have_rows() -> None:
    own = OwnModel(name="mine", function="my.models:build")
    record = made_up.record(made_up.cell("fcdp", own))
    table = frame([record])
    assert list(table["model"]) == ["mine"]
    assert table[["family", "layers", "width", "heads"]].isna().all(axis=None)
    assert list(tables.presentable(compare([record]))["Model"]) == ["mine"]


def test_notes_name_every_baseline_and_why_cells_were_skipped(compared: pd.DataFrame) -> None:
    notes = "\n".join(tables.notes(compared))
    assert "DeepSpeed ZeRO-3 (11 of 12 settings); FSDP2 (1 of 12 settings)" in notes
    assert "1 skipped: skip rule." in notes
    assert "1 failed" in notes


def test_notes_say_of_which_steps_losses_are_where_cells_differ_in_them() -> None:
    cells = [
        made_up.cell(strategy, steps=steps)
        for strategy, steps in (("deepspeed-zero3", 2), ("fcdp", 3))
    ]
    both = compare([made_up.record(cell) for cell in cells])
    assert "that both cells trained" in "\n".join(tables.notes(both))
    assert "both cells" not in "\n".join(tables.notes(both[:1]))
