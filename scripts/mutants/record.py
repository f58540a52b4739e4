"""Outcomes of mutants: cached between runs, committed, and shown in docs."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts.mutants.files import tests_of
from scripts.mutants.operators import Mutant
from simulation import files

_FOLDER = "results/mutants"

#: A mutant's key in equivalent.yaml: file, function, and the lines before and after.
_Change = tuple[str, str, str, str]


class Cache:
    """Outcomes by what they depend on: the mutated file, and the tests that are run.

    Changes of the library's other files since then are ignored.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file = root / ".mutants/tried.jsonl"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()
        lines = map(json.loads, self._file.read_text(encoding="utf-8").splitlines())
        self._caught: dict[str, str] = dict(lines)

    def get(self, mutant: Mutant) -> str | None:
        return self._caught.get(self._key(mutant))

    def add(self, mutant: Mutant, caught: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._key(mutant), caught]) + "\n")

    def _key(self, mutant: Mutant) -> str:
        text = f"{mutant.file} {_digest(self._root, tests_of(mutant.file))} {mutant.source}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _digest(root: Path, tests: tuple[str, ...]) -> str:
    shared = [path for path in root.glob("tests/fcdp/**/*.py") if "test_" not in path.name]
    for test in tests:
        shared += [root / test] if test.endswith(".py") else (root / test).glob("**/test_*.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted({*shared}))).hexdigest()


def catchers(root: Path) -> dict[tuple[str | int, ...], str]:
    """The test that caught each mutant when the record was made, by the mutant's name."""
    file = files.stored(root / _FOLDER / "mutants.jsonl")
    records = map(json.loads, files.lines(file) if file.exists() else [])
    return {tuple(record[:-1]): record[-1] for record in records}


def report(root: Path, caught_by: Mapping[Mutant, str]) -> int:
    """Print shares and unexplained survivors; return 1 if there is one."""
    explained = _explained(root)
    unexplained = [m for m, by in caught_by.items() if not by and _change(m) not in explained]
    print(*_table(caught_by, explained, lambda each: each.part), sep="\n")
    for each in unexplained:
        print(f"survived, and not explained: {each}")
    return 1 if unexplained else 0


def write(root: Path, caught_by: Mapping[Mutant, str]) -> None:
    folder = root / _FOLDER
    folder.mkdir(exist_ok=True)
    lines = [json.dumps([*each.name, caught_by[each]], ensure_ascii=False) for each in caught_by]
    (folder / "mutants.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files.compress(folder / "mutants.jsonl")
    page = root / f"{_FOLDER}/README.md"
    head, _, _ = page.read_text(encoding="utf-8").partition(_MARK)
    explained = _explained(root)
    survivors = [each for each in caught_by if not caught_by[each]]
    rows = [
        *_table(caught_by, explained, lambda each: each.part),
        "",
        *_table(caught_by, explained, lambda each: f"{each.file} ({each.part})"),
        "",
        "## Survivors",
        "",
        *(_shown(each, explained.get(_change(each), "**not explained**")) for each in survivors),
    ]
    page.write_text(f"{head}{_MARK}\n\n" + "\n".join(rows) + "\n", encoding="utf-8")


_MARK = "<!-- what follows is written by `make mutants` -->"


def _shown(mutant: Mutant, because: str) -> str:
    change = f"`{mutant.before}` → `{mutant.after}`".replace("\n", " ")
    return f"- `{mutant.file}`, `{mutant.function or 'module'}`: {change}: {because}"


def _table(
    caught_by: Mapping[Mutant, str], explained: Mapping[_Change, str], of: Callable[[Mutant], str]
) -> list[str]:
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for each in caught_by:
        groups[of(each)].append(each)
    rows = ["| Mutants | | caught | equivalent | share caught |", "|---|--:|--:|--:|--:|"]
    for name, mutants in groups.items():
        caught = sum(1 for each in mutants if caught_by[each])
        equal = sum(1 for each in mutants if not caught_by[each] and _change(each) in explained)
        share = caught / max(1, len(mutants) - equal)
        rows.append(f"| {name} | {len(mutants)} | {caught} | {equal} | {share:.1%} |")
    return rows


def _explained(root: Path) -> dict[_Change, str]:
    """Reasons why a mutant changes nothing that a test could see."""
    file = root / _FOLDER / "equivalent.yaml"
    entries: Sequence[Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        (entry["file"], entry["function"], before, after): entry["because"]
        for entry in entries
        for before, after in entry["changes"]
    }


def _change(mutant: Mutant) -> _Change:
    return mutant.file, mutant.function, mutant.before, mutant.after
