import html
import re
from pathlib import Path

import pandas as pd
import pytest

from analysis import strategies
from analysis.__main__ import RESULTS
from analysis.claims.computations import Selection, Value
from analysis.compare.baseline import compare
from analysis.load.rows import row
from analysis.load.table import frame, latest
from analysis.report import run
from experiments.records.record import METRICS, Record, read
from experiments.records.select import FILE
from experiments.records.workload import OwnModel
from tests.analysis import made_up
from tests.analysis.pages import check_page


@pytest.fixture(scope="module")
def written(records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> run.Written:
    again = records[0].model_copy(update={"started_at": "2025-12-31T00:00:00+00:00"})
    folder = tmp_path_factory.mktemp("run")
    files = {folder / "records.jsonl": [again, *records]}
    return run.write(files, folder / "report", "deepspeed-zero3")


@pytest.fixture(scope="module")
def page(written: run.Written) -> str:
    return written.report.read_text("utf-8")


def test_the_page_is_whole_and_loads_nothing_and_texts_are_escaped(page: str) -> None:
    check_page(page, pictures=2)
    linked = [re.findall('href="(.*?)"', caption) for caption in page.split("<figcaption>")[1:]]
    assert linked == [["../records.jsonl"]] * 2
    assert "<script>alert(" not in page
    assert html.escape("<script>alert(", quote=False) in page


def test_headlines_are_there_with_their_cells(page: str) -> None:
    for figure in ("3.3×", "30 %", "28×", "1.3 %"):
        assert f'<span class="big">{figure}</span>' in page
    assert "The fastest other strategy there is FSDP2" in page


def test_every_cell_that_ran_has_a_row_and_where_it_comes_from_is_there(
    page: str, records: list[Record], written: run.Written
) -> None:
    ran = [record for record in records if record.state != "skipped"]
    assert len(re.findall("<tr class=", page)) == len(ran)
    record = records[0]
    for part in (record.commit, "made-up CPU", "rate bits per s: 10000000", "transformers 4.57.0"):
        assert part in page
    assert "1 older record of cells that were run again left out" in page
    assert "gloo implements a reduce-scatter" in page
    assert "DeepSpeed ZeRO-3 1.03 to 1.30, FSDP2 1.02 to 1.25" in page
    # And no path of this machine.
    assert str(written.report.parent) not in page
    assert str(Path.cwd()) not in page


def test_a_page_of_nothing_but_failures(tmp_path: Path) -> None:
    none = {"error": None, "measurement": None, "network": {}}
    failed = made_up.record(made_up.cell("fcdp"), state="failed", **none)
    written = run.write({tmp_path / "records.jsonl": [failed]}, tmp_path, "deepspeed-zero3")
    assert written.figures == []
    assert "no error text" in written.report.read_text("utf-8")


@pytest.mark.parametrize(
    "table", sorted(RESULTS.rglob("comparison.md")), ids=lambda table: table.parts[-3]
)
def test_committed_comparisons_are_what_their_records_give(table: Path) -> None:
    records = latest(read(table.parents[1] / FILE))
    baseline = "ddp" if table.parts[-3] == "cyclic-digits" else strategies.BASELINE
    assert table.read_text("utf-8") == run.markdown(compare(records, baseline))


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_a_column_where_there_is_one_and_a_quantity_of_claims(
    compared: pd.DataFrame, name: str
) -> None:
    record = made_up.record(made_up.cell("fcdp"), **{name: 0.25})
    title = METRICS[name].title
    assert list(run.presentable(compare([record]))[title]) == [METRICS[name].written(0.25)]
    assert title not in run.presentable(compared)
    asked = Value(kind="value", quantity=name, of=Selection(strategy="fcdp"))
    assert [sample.value for sample in asked.samples([row(record)])] == [0.25]
    with pytest.raises(ValueError, match=f"'{name}s' is no quantity; allowed are "):
        Value(kind="value", quantity=f"{name}s", of=Selection(strategy="fcdp"))


def test_cells_of_users_models_have_rows() -> None:
    model = OwnModel(name="mine", function="my.models:build")
    record = made_up.record(made_up.cell("fcdp", model))
    table = frame([record])
    assert list(table["model"]) == ["mine"]
    assert table[["family", "layers", "width", "heads"]].isna().all(axis=None)
    assert list(run.presentable(compare([record]))["Model"]) == ["mine"]
