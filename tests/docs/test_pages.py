"""Every page: its links lead somewhere, its code is Python, README and index name it."""

from __future__ import annotations

import re
from pathlib import Path

import fcdp
from tests.docs import DOCS, ROOT, code_blocks

PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_code_compiles_and_names_only_what_there_is() -> None:
    for page, text in PAGES.items():
        for block in code_blocks(page):
            compile(block, page, "exec")
            if "from baselines.presets import fcdp" in block:  # the strategy of that name
                text = text.replace(block, "")
        names = re.findall(r"\bfcdp\.([A-Za-z]\w*)", re.sub(r"from fcdp\S*", "", text))
        assert [name for name in names if not hasattr(fcdp, name)] == [], page


def test_the_readme_leads_to_the_five_pages_and_the_front_to_all() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    five = ("docs/use.md", "docs/extend.md", "docs/reference.md", "REPRODUCTION.md")
    assert [page for page in five if f"]({page})" not in readme] == []
    others = [page for page in PAGES if page != "README.md"]
    front = re.sub(r"\s+", " ", PAGES["README.md"])
    assert [page for page in others if f"]({page})" not in front] == []


def test_the_pages_are_short() -> None:
    """As `wc -w` counts them, tables' rules included."""
    assert sum(len(text.split()) for text in PAGES.values()) <= 20_000
    assert len((ROOT / "REPRODUCTION.md").read_text(encoding="utf-8").split()) <= 5_000


def test_links_lead_to_a_file_and_its_heading() -> None:
    others = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    for page in (*others, *(DOCS / name for name in PAGES)):
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
    assert len(text.splitlines()) <= 60
