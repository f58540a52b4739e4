"""Mutants: their changes, their names, and tests for each."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from scripts.mutants import __main__ as command
from scripts.mutants import files as parts
from scripts.mutants.files import ARITHMETIC, TESTS, part_of
from scripts.mutants.operators import Mutant, Source, omissions, order
from tests import programs
from tests.programs import ROOT

CODE = """\
class Tier:
    def store(self, given: bool | None) -> None:
        stream = self._streams.copies_out
        stream.wait_stream(self._streams.current())
        with self._exchanges, self._streams.on(stream):
            wait_all(gather(self._topology.inter))
        self._landed = stream.record_event()
        if entry.held != entry.generation and self._ready:
            entry.written = True
        raise ValueError(f"{min(self.sizes)}: must not be any(of these)")
"""
_NOTHING = '__import__("contextlib").nullcontext()'


def changed(source: Source) -> list[tuple[int, str]]:
    """Lines after each edit of a thing that orders or chooses, with their numbers."""
    return [(each.line, each.after) for each in source.mutants("order", order(source))]


def test_each_thing_that_orders_or_chooses_is_taken_out_alone() -> None:
    assert changed(Source("code.py", CODE)) == [
        (3, "stream = self._streams.copies_in"),
        (4, "pass"),
        (4, "stream.wait_stream(self._streams.copies_in)"),
        (5, f"with self._exchanges, {_NOTHING}:"),
        (6, "gather(self._topology.inter)"),
        (6, "wait_all(gather(self._topology.reduce_inter))"),
        (7, "self._landed = type(stream)().record_event()"),
        (8, "if True and self._ready:"),
        (8, "if False and self._ready:"),
        (9, "pass"),
    ]


def test_statements_and_conditions_are_left_out_and_what_errors_say_is_not() -> None:
    source = Source("code.py", CODE)
    changes = [each.after for each in source.mutants("arithmetic", omissions(source))]
    assert "if (self._ready):" in changes
    assert "if (entry.held != entry.generation):" in changes
    assert not any("max" in each or "all(of" in each for each in changes)


def test_a_mutant_has_the_same_name_wherever_its_function_stands() -> None:
    original, moved = (Source("code.py", text) for text in (CODE, f"import os\n\n\n{CODE}"))
    names = [[each.name for each in of.mutants("order", order(of))] for of in (original, moved)]
    assert names[0] == names[1]
    assert len({*names[0]}) == len(names[0])
    assert {name[1] for name in names[0]} == {"Tier.store"}


def test_every_file_that_has_mutants_has_tests() -> None:
    with_mutants = {part_of(each.file) for each in parts.sources(ROOT) if changed(each)}
    assert with_mutants | {*ARITHMETIC} == {*TESTS}
    tests = {test for part in TESTS for test in parts.tests_of(f"fcdp/{part}")}
    assert [test for test in tests if not (ROOT / test).exists()] == []


def test_a_sample_is_of_mutants_that_a_test_has_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("code.py", CODE)
    first, second, third, *_ = faults = source.mutants("order", order(source))
    caught = {first.name: "tests/one.py::test", second.name: "a hang", third.name: ""}
    monkeypatch.setattr(command.record, "catchers", lambda _: caught)
    monkeypatch.setattr(command, "_try", lambda chosen, *_: [(each, "tried") for each in chosen])
    options = Namespace(seed="", seconds=1.0)
    assert command._sample(faults, options) == {first: "tried"}


@pytest.mark.system  # some ten seconds
def test_every_reason_is_of_a_mutant_that_no_test_catches() -> None:
    caught = command.record.catchers(ROOT)
    survivors = {
        command.record.key(each) for each in parts.mutants(ROOT) if not caught.get(each.name)
    }
    assert sorted({*command.record.reasons(ROOT)} - survivors) == []
    text = (ROOT / "results/mutants/equivalent.yaml").read_text(encoding="utf-8")
    changes = sum(len(entry["changes"]) for entry in yaml.safe_load(text))
    assert changes == len(command.record.reasons(ROOT)), "a mutant has two reasons"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "results/mutants").mkdir(parents=True)
    (tmp_path / "results/mutants/README.md").write_text("Mutants\n", encoding="utf-8")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/one.py").write_text("def test(): ...\n", encoding="utf-8")
    return tmp_path


def explain(tree: Path, *mutants: Mutant) -> None:
    reasons = [
        {
            "file": each.file,
            "function": each.function,
            "because": "it is as good",
            "changes": [[each.before, each.after]],
        }
        for each in mutants
    ]
    (tree / "results/mutants/equivalent.yaml").write_text(json.dumps(reasons), encoding="utf-8")


def test_what_is_not_tried_again_keeps_its_outcome(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("fcdp/staleness.py", CODE)
    every = first, second, third, fourth, *new = source.mutants("order", order(source))
    explain(tree, third)
    caught = {first: "tests/one.py::test", second: "", third: "", fourth: "tests/one.py::gone"}
    command.record.write(tree, every, caught)
    command.record.write(tree, every, {})
    outcomes = {first.name: "tests/one.py::test", second.name: "", third.name: ""}
    assert command.record.catchers(tree) == outcomes
    page = (tree / "results/mutants/README.md").read_text(encoding="utf-8")
    assert f"| order | {len(every)} | 1 | 1 | {len(new) + 1} | 50.0% |" in page
    monkeypatch.setattr(command, "ROOT", tree)
    # One that survives and has no reason needs a test, or a reason: it is tried again.
    assert command._chosen(every, Namespace(files=[], seconds=None)) == [second, fourth, *new]
    assert command._chosen(every, Namespace(files=["all"], seconds=None)) == every
    assert command._chosen(every, Namespace(files=["staleness"], seconds=1.0)) == every
    assert command._chosen(every, Namespace(files=["cache"], seconds=1.0)) == []


def test_a_survivor_with_a_reason_is_tried_by_all_tests_once_the_reason_is_gone(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("fcdp/staleness.py", CODE)
    first, *_ = source.mutants("order", order(source))
    monkeypatch.setattr(command, "ROOT", tree)
    monkeypatch.setattr(command, "_try", lambda left, *_: [(each, "") for each in left])
    monkeypatch.setattr(command.record, "tests_of", lambda _: ())
    explain(tree, first)
    assert command._all([first], Namespace(unit=False)) == {first: ""}
    assert command.record.Cache(tree).get(first) is None
    explain(tree)
    assert command._all([first], Namespace(unit=False)) == {first: ""}
    assert command.record.Cache(tree).get(first) == ""


@pytest.mark.system
def test_what_is_tried_is_the_mutant_and_not_what_its_parent_has_imported(tmp_path: Path) -> None:
    (tmp_path / "fcdp").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "fcdp/__init__.py").write_text("ONE = 1\n")
    (tmp_path / "tests/test_one.py").write_text(
        "import fcdp\ndef test_one(): assert fcdp.one() == 1\n"
    )
    program = f"""if True:
        import dataclasses, pathlib, fcdp
        from scripts.mutants.files import mutants
        from scripts.mutants.__main__ import Tree, run
        root = pathlib.Path({str(tmp_path)!r})
        any_ = next(mutants(pathlib.Path()))
        tree = Tree(root, root / "tree")
        for one in (1, 2):
            source = f"import numba\\n@numba.njit(cache=True)\\ndef one(): return {{one}}"
            mutant = dataclasses.replace(any_, file="fcdp/__init__.py", source=source)
            tree.put(mutant)
            print(*run(tree, ["tests"], 60))
            cached = len([*tree.place.glob("fcdp/**/*.nb?")])
            tree.restore(mutant)
            print(cached, len([*tree.place.glob("fcdp/**/*.nb?")]))
        """
    ran = programs.printed(sys.executable, "-c", program)
    passed, failed = "0 the end of the process", "1 tests/test_one.py::test_one"
    assert ran.splitlines() == [passed, "2 0", failed, "2 0"]
