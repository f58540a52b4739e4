"""REPRODUCTION.md is what the committed records and claims give; its page is whole."""

import html
import re
from typing import get_args

import pytest
from typer.testing import CliRunner

from analysis import text
from analysis.__main__ import RESULTS, app
from analysis.claims import papers
from analysis.claims.papers import Claim
from analysis.claims.verdicts import HYPOTHESES, VERDICTS, Verdict
from analysis.load import runs
from analysis.paper import contents, region, tables
from analysis.report import reproduction
from tests.analysis import made_up
from tests.analysis.conftest import write_records
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
        result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 0, result.output
    assert str(results / "report.html") in result.output
    assert (results.parent / "REPRODUCTION.md").exists()
    return (results / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def pages() -> reproduction.Document:
    return reproduction.document(papers.load(), runs.load(RESULTS))


@pytest.fixture
def document(pages: reproduction.Document) -> str:
    return pages.markdown[reproduction.DOCUMENT]


def test_the_committed_pages_are_up_to_date(pages: reproduction.Document) -> None:
    for name, written in pages.markdown.items():
        assert (ROOT / name).read_text("utf-8") == written, (
            f"{name} differs from the records: run python -m analysis report"
        )


def findings(claim: Claim) -> int:
    """The number of findings: one per check, and one for tests or for a claim without checks."""
    return len(claim.checks) + (not claim.checks or bool(claim.shown_by))


def test_every_claim_is_in_its_papers_table_with_its_verdict(pages: reproduction.Document) -> None:
    claims_page = pages.markdown[f"{reproduction.PAGES}/claims.md"]
    tables = claims_page.split("\n## FCDP: ")[1]
    for claim in papers.load().claims:
        lines = [line for line in tables.splitlines() if line.startswith(f"| {claim.claim} |")]
        assert len(lines) == findings(claim), claim.id
    rows = [line for line in tables.splitlines() if "`python -m experiments run" in line]
    known = [f"| {verdict} |" for pair in VERDICTS.values() for verdict in pair]
    known += [f"| {verdict} |" for verdict in get_args(Verdict) if " " in verdict]
    known += ["| **not reproduced** |", "| not run |", "| undecided |"]
    assert all(any(verdict in row for verdict in known) for row in rows if row.startswith("|"))
    # The finding about hpZ is noted where the 51 times are.
    (note,) = re.findall(r"\((\w+)\) .*keeps those of frozen ones", claims_page)
    up_to = [line for line in claims_page.splitlines() if line.startswith("| Up to 51 times")]
    assert any(f"(#note-{note})" in row for row in up_to)


def test_the_document_opens_with_a_row_for_each_result_of_the_paper(document: str) -> None:
    opening = document.split("\n## ")[0]
    rows = [line for line in opening.splitlines() if line.startswith("| ")][1:]
    sections = contents.load(papers.load()).sections
    assert len(rows) == sum(len(section.first) for section in sections)
    for section in sections:
        assert f"](#{section.id}) |" in opening
        assert document.count(f'<a id="{section.id}"></a>') == 1


def test_no_paragraph_is_twice_on_a_page(pages: reproduction.Document) -> None:
    for page in pages.markdown.values():
        prose = [line for line in page.splitlines() if len(line) > 60 and line[0] not in "|!`"]
        # Without the number of a note.
        prose = [re.sub(r'^- <a id="note-\w+"></a>\(\w+\) ', "", line) for line in prose]
        assert len(prose) == len(set(prose))
        for claim in papers.load().claims:
            for check in claim.checks:
                for note in filter(None, (check.note, check.because)):
                    assert page.count(note.strip()) <= 1, note


def test_every_page_has_its_notes_once(pages: reproduction.Document, document: str) -> None:
    for page in pages.markdown.values():
        there = re.findall(r'<a id="note-(\w+)"></a>', page)
        assert len(there) == len(set(there))
        assert set(re.findall(r"\(#note-(\w+)\)", page)) <= set(there)
    assert "alone changed from" in document


def test_other_papers_have_pages_with_their_findings_figures_and_spreads(
    pages: reproduction.Document,
) -> None:
    for path in contents.OTHERS:
        holds = contents.load(papers.load(), path)
        chapter, sections = pages.markdown[f"results/paper/{holds.paper}.md"], holds.sections
        assert chapter.count("![") == len(sections)
        for section in sections:
            assert f'<a id="{section.id}"></a>' in chapter
            # The bound is a study of its own, and no matrix.
            commands = ("bound" if n == "bound" else f"run {n}" for n in section.matrices)
            assert all(f"experiments {command}`" in chapter for command in commands)
            assert all(seeds.title in chapter for seeds in section.seeds)
        assert "Why:" in chapter


def test_no_contradiction_is_claimed_and_the_best_point_is_stated(document: str) -> None:
    opening = document.split("\n## ")[0]
    known = region.region(papers.load())
    assert "contradict" not in document
    assert region.in_words(known.holds, known.points, known.paper) in opening
    assert opening.count("![") == 1


def test_nothing_is_reproduced_that_no_paper_gives(pages: reproduction.Document) -> None:
    for paper in pages.values["papers"]:
        for row in paper["checked"]:
            if row["label"] in HYPOTHESES:
                assert "reproduced" not in row["verdict"], row["id"]
            assert row["verdict"] != "reproduced" or row["paper"] != text.ABSENT, row["id"]


def test_committed_tables_are_those_of_the_sections(pages: reproduction.Document) -> None:
    written = [part.table for chapter in pages.chapters for part in chapter.parts]
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
    expected = sum(map(findings, papers.load().claims))
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
