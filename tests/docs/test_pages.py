"""Every page: its links lead somewhere, its code is Python, README and index name it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import DOCS, ROOT, code_blocks

PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (DOCS / page).read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert inside
    assert [target for target in inside if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_code_compiles_and_names_only_what_there_is(page: str) -> None:
    import fcdp

    text = (DOCS / page).read_text(encoding="utf-8")
    for block in code_blocks(page):
        compile(block, page, "exec")
        if "from baselines.presets import fcdp" in block:  # the strategy of that name
            text = text.replace(block, "")
    names = re.findall(r"\bfcdp\.([A-Za-z]\w*)", re.sub(r"from fcdp\S*", "", text))
    assert [name for name in names if not hasattr(fcdp, name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_readme_links_it(page: str) -> None:
    assert f"(docs/{page})" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_the_index_says_what_it_answers(page: str) -> None:
    assert f"]({page})" in (DOCS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [ROOT / "README.md", *(DOCS / name for name in PAGES)], ids=str)
def test_links_to_headings_have_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    for target, heading in links:
        if "://" not in target:
            assert heading in anchors(page.parent / target if target else page), (target, heading)


TERMS = """
    inter-node all-gather, intra-node all-gather, gradient accumulation without sync,
    partial gradients, prefetch depth, activation-checkpointing fraction, replicated,
    protocol overhead, small multiples, start barrier, root cause, version pins, unit,
    slice, shard, rank, node, micro-batch, cell, matrix, record, workload, cluster,
    strategy, policy, tier, staleness, codec, ledger
"""


def test_the_glossary_has_each_term_once_on_one_page() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", text, re.MULTILINE)
    assert sorted(set(terms)) == sorted(terms)
    assert {" ".join(term.split()) for term in TERMS.split(",")} <= set(terms)
    assert len(text.splitlines()) <= 60
