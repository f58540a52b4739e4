"""Every page: its links lead somewhere, its code is Python, its numbers are those of the code.

Measured numbers stand in blocks that a command writes: prose has none of its own.
"""

import re
from pathlib import Path

import fcdp
from experiments.commands import COMMANDS
from simulation import compute
from simulation.hardware import LINK_EFFICIENCY
from simulation.planner.search import SAME, tie
from tests.docs import DOCS, ROOT
from tests.docs.commands import fences

PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages outside of docs, whose links are checked too.
OTHERS = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("results/README.md", "results/tables.md"),
)
#: Speed-ups, bytes of a step, speeds; not dimensions, such as 2 × 2.
MEASURED = re.compile(r"(\d[\d.,]*)(?:×(?! ?\d)| (?:tokens/s|MB (?:per|a) step|s/step))")
#: Superlatives of speed. "The fastest other" and the like name what FCDP is compared with.
SUPERLATIVE = re.compile(
    r"\b(fastest|quickest|unbeaten)\b(?! (other|exact|rival))|\b(outperforms|beats|wins)\b|"
    r"\bfaster than (all|any|every|each|everything|the others)\b|\bnothing is faster",
    re.IGNORECASE,
)
BLOCK = re.compile(r"<!-- (\S+?)(?:: [^>]*)? -->.*?(?:<!-- end of \1 -->|\Z|(?=\n#))", re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_code_compiles_and_names_only_what_there_is() -> None:
    for page, text in PAGES.items():
        for block in (text for language, text in fences(DOCS / page) if language == "python"):
            compile(block, page, "exec")
            if "from baselines.presets import fcdp" in block:  # the strategy of that name
                text = text.replace(block, "")
        names = re.findall(r"\bfcdp\.([A-Za-z]\w*)", re.sub(r"(from|-m\s) *fcdp\S*", "", text))
        assert [name for name in names if not hasattr(fcdp, name)] == [], page


def test_the_readme_leads_to_the_five_pages_and_the_front_to_all() -> None:
    five = ("docs/use.md", "docs/extend.md", "docs/reference.md", "REPRODUCTION.md")
    assert [page for page in five if f"]({page})" not in README] == []
    others = [page for page in PAGES if page != "README.md"]
    front = re.sub(r"\s+", " ", PAGES["README.md"])
    assert [page for page in others if f"]({page})" not in front] == []


def test_links_lead_to_a_file_and_its_heading() -> None:
    for page in (*(ROOT / name for name in OTHERS), *(DOCS / name for name in PAGES)):
        text = page.read_text(encoding="utf-8")
        pictures = [(picture, "") for picture in re.findall(r'src(?:set)?="([^"]+)"', text)]
        links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text)
        inside = [link for link in links + pictures if "://" not in link[0]]
        assert inside or page.parent == DOCS, page
        for target, heading in inside:
            file = page.parent / target if target else page
            assert file.exists(), (page.name, target)
            assert not heading or heading in anchors(file), (page.name, target, heading)


TERMS = """
    inter-node all-gather, intra-node all-gather, gradient accumulation without sync,
    partial gradients, prefetch depth, activation-checkpointing fraction, replicated,
    protocol overhead, small multiples, start barrier, root cause, version pins, unit,
    slice, shard, rank, node, micro-batch, cell, matrix, record, workload, cluster,
    strategy, policy, tier, staleness, codec, ledger
"""


def test_the_glossary_has_each_term_once_on_one_page() -> None:
    text = PAGES["glossary.md"]
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", text, re.MULTILINE)
    assert sorted(set(terms)) == sorted(terms)
    assert {" ".join(term.split()) for term in TERMS.split(",")} <= set(terms)


def blocks(page: str) -> str:
    """Parts of a page that a command writes, or that a test compares with their source."""
    return "\n".join(match[0] for match in BLOCK.finditer(page))


def prose(page: str) -> str:
    """The rest of a page, without code."""
    return re.sub(r"```.*?```", "", BLOCK.sub("", page), flags=re.DOTALL)


def test_no_measured_number_stands_in_prose_alone() -> None:
    made = [
        ROOT / "REPRODUCTION.md",
        ROOT / "results/tables.md",
        *(ROOT / "results/paper").glob("*.md"),
    ]
    pages = {**PAGES, "the README": README}
    written = [*map(blocks, pages.values()), *(page.read_text("utf-8") for page in made)]
    known = set(re.findall(r"\d[\d.,]*", "\n".join(written)))
    for name, page in pages.items():
        assert {*MEASURED.findall(prose(page))} <= known, name
    page = "It is 3.5× as fast.\n<!-- a: written by b -->\n7×\n<!-- end of a -->\n2 × 2\n"
    assert (MEASURED.findall(prose(page)), MEASURED.findall(blocks(page))) == (["3.5"], ["7"])


def boasts(page: str) -> list[str]:
    """Sentences that a person wrote and that call FCDP the fastest."""
    sentences = re.split(r"(?<=[.:;!?])\s+|\n\n|\n[-|]", prose(page))
    ours = re.compile(r"\bFCDP\b|\bthis (library|engine)\b|^\**It\b", re.IGNORECASE)
    return [each for each in sentences if ours.search(each) and SUPERLATIVE.search(each)]


def test_who_is_fastest_is_said_by_records_alone() -> None:
    """scripts/readme.py writes it; tests/scripts/test_headline.py compares it with the table."""
    report = (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8")
    pages = {**PAGES, "the README": README, "the report": report}
    assert {name: found for name, page in pages.items() if (found := boasts(page))} == {}
    assert len(boasts("FCDP is the fastest. FCDP\nbeats HSDP. It is faster than any other.")) == 3
    assert boasts("FCDP's speed over the fastest other. HSDP is the fastest.") == []


def test_the_reference_has_all_commands() -> None:
    assert set(COMMANDS) <= set(re.findall(r"`([a-z][a-z-]+)", PAGES["reference.md"]))


def test_the_figures_of_planning_are_those_of_the_code() -> None:
    text = " ".join(PAGES["planning.md"].split())
    for share, pattern in (
        (LINK_EFFICIENCY, r"(\d+) % \(links\)"),
        (SAME, r"the simplest within (\d+) % of the fastest"),
        (tie(), r"within (\d+) % of it: the simulator"),
    ):
        match = re.search(pattern, text)
        assert match is not None, pattern
        assert int(match[1]) == round(100 * share)
    text, record = text.replace(" %", "%"), compute.read()
    sources, architectures = record.check(compute.SOURCES), record.check(compute.ARCHITECTURES)
    for phrase in (
        f"to {len(record.predictions)} published runs",
        f"are predicted to {sources.median:.1%} in the median",
        f"nine of ten are within {sources.nine_of_ten:.1%}",
        f"the other to {architectures.median:.0%} in the median",
        f"from −{1 - architectures.lowest:.0%} (",
        f"to +{architectures.highest - 1:.0%}",
    ):
        assert phrase in text
