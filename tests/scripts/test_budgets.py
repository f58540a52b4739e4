"""Counts of lines, modules and imports beside their budgets."""

from pathlib import Path

import grimp
import pytest

from scripts import budgets


def test_a_count_past_its_budget_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"lines of source": 11, "lines of tests": 10}
    monkeypatch.setattr(budgets, "counts", lambda: counts)
    monkeypatch.setattr(budgets, "BUDGETS", dict.fromkeys(counts, budgets.Budget(10, 5)))
    assert budgets.main() == 1
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.split() == [*["lines", "of", "source", "11", "10", "5", "past", "its", "budget"]]
    assert second.split() == [*["lines", "of", "tests", "10", "10", "5"]]
    counts["lines of source"] = 10
    assert budgets.main() == 0


def test_imports_in_functions_are_counted_once() -> None:
    text = "import a\ndef f():\n    import b\n    def g():\n        from c import d\n"
    assert budgets._imports_in_functions(text) == 2


def test_what_one_module_alone_imports_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "counted_package"
    folder.mkdir()
    for name, text in {
        "__init__": "",
        "once": "",
        "twice": "",
        "first": "from counted_package import once, twice",
        "second": "from counted_package import twice",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    graph = grimp.build_graph("counted_package", cache_dir=None)
    assert [*budgets._with_one_importer(graph)] == ["counted_package.once"]
