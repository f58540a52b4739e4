"""REPRODUCTION.md is what the committed records and claims give; its page is whole."""

import html
import re

import pytest

from analysis.__main__ import RESULTS
from analysis.claims import papers
from analysis.load import runs
from analysis.paper import tables
from analysis.report import reproduction
from tests.analysis import made_up
from tests.analysis.conftest import called, write_records
from tests.analysis.pages import check_page
from tests.programs import ROOT


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page that the command writes of made-up records, under the name of a real matrix."""
    results = tmp_path_factory.mktemp("root") / "results"
    (results / "parity").mkdir(parents=True)
    write_records(made_up.records(), results / "parity" / "records.jsonl")
    (results / "memory").mkdir()
    (results / "memory" / "records.jsonl").write_text('{"of": "another schema"}\n', "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("analysis.__main__.RESULTS", results)
        result = called("report")
    assert str(results / "report.html") in result.output
    assert (results.parent / "REPRODUCTION.md").exists()
    return (results / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def pages(committed: list[runs.AnyRun]) -> reproduction.Document:
    return reproduction.document(papers.load(), committed)


def test_the_committed_pages_are_up_to_date(pages: reproduction.Document) -> None:
    for name, written in pages.markdown.items():
        assert (ROOT / name).read_text("utf-8") == written, (
            f"{name} differs from the records: run python -m analysis report"
        )


def test_committed_tables_are_those_of_the_sections(pages: reproduction.Document) -> None:
    written = [table for chapter in pages.chapters for table in chapter.written]
    folder = RESULTS / "paper" / "tables"
    for end, write in {"csv": tables.as_csv, "tex": tables.as_latex}.items():
        assert {file.stem for file in folder.glob(f"*.{end}")} == {table.name for table in written}
        for table in written:
            assert (folder / f"{table.name}.{end}").read_text("utf-8") == write(table)


def test_committed_figures_are_those_of_the_pages(pages: reproduction.Document) -> None:
    drawn = {drawing.name for chapter in pages.chapters for drawing in chapter.drawn}
    committed = [*(RESULTS / "paper" / "figures").iterdir()]
    assert {file.name for file in committed} == {f"{name}.svg" for name in drawn}


def test_the_page_is_whole_with_a_row_for_each_claim_and_check(page: str) -> None:
    # The losses stand in the chapter, too, and ranges above it.
    check_page(page, pictures=6)
    opening = page.split("<main>")[1].split("<h2", 2)[1]
    assert "emulated" in opening
    assert "Does the idea hold?" in opening
    expected = sum(max(len(claim.checks), 1) for claim in papers.load().every)
    assert len(re.findall('class="claim"', page)) == expected
    assert html.escape("No committed record tests it; it takes") in page
    assert "made-up CPU" in page
    assert str(ROOT) not in page


def test_each_figure_is_small_and_has_its_records(page: str) -> None:
    captions = page.split("<figcaption>")[1:]
    assert len(captions) == page.count("<svg ")
    for caption in captions:
        linked = re.findall('href="(.*?)"', caption.split("</figcaption>")[0])
        assert linked
        assert set(linked) <= {"parity/records.jsonl", "../analysis/paper/region.json"}
    assert max(len(each) for each in re.findall("<svg .*?</svg>", page, re.DOTALL)) < 80_000
    assert "data:image" not in page


def test_links_lead_to_files(pages: reproduction.Document) -> None:
    for name, page in pages.markdown.items():
        linked = [each for each in re.findall(r"\]\((.*?)\)", page) if each[0] not in "#h"]
        here = (ROOT / name).parent
        assert [each for each in linked if not (here / each.split("#")[0]).exists()] == []
    records = re.findall(r"\| \[records\]", pages.markdown[f"{reproduction.PAGES}/runs.md"])
    assert len(records) > 40
