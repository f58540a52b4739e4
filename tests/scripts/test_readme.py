"""Pages whose tables are written from records."""

from __future__ import annotations

import pytest

from scripts import readme


def test_a_page_without_a_place_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md: found 0 places for result, expected 1"):
        readme.rewritten("README.md", "# FCDP\n")
