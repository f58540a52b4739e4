"""Every page: its links lead somewhere, its code is Python, the README names it."""

from __future__ import annotations

import re

import pytest

from tests.docs import DOCS, ROOT, code_blocks

PAGES = sorted(path.name for path in DOCS.glob("*.md"))


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
    names = re.findall(r"\bfcdp\.([A-Za-z]\w*)", re.sub(r"from fcdp\S*", "", text))
    assert [name for name in names if not hasattr(fcdp, name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_readme_links_it(page: str) -> None:
    assert f"(docs/{page})" in (ROOT / "README.md").read_text(encoding="utf-8")
