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
Key = tuple[str, str, str, str]


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
    """The test that caught each mutant that the record has, by the mutant's name.

    Without those whose test is no longer there.
    """
    file = files.stored(root / _FOLDER / "mutants.jsonl")
    records = map(json.loads, files.lines(file) if file.exists() else [])
    caught = {tuple(record[:-1]): record[-1] for record in records}
    return {name: by for name, by in caught.items() if _is_there(root, by)}


@cache
def _is_there(root: Path, caught_by: str) -> bool:
    path, _, test = caught_by.partition("::")
    if not test:  # a hang, say
        return True
    function = test.partition("[")[0].rpartition("::")[2]
    file = root / path
    return file.exists() and f"def {function}(" in file.read_text(encoding="utf-8")


def report(root: Path, caught_by: Mapping[Mutant, str]) -> int:
    """Print shares and unexplained survivors; return 1 if there is one."""
    explained = reasons(root)
    unexplained = [m for m, by in caught_by.items() if not by and key(m) not in explained]
    print(*_table(caught_by, explained, lambda each: each.part), sep="\n")
    for each in unexplained:
        print(f"survived, and not explained: {each}")
    return 1 if unexplained else 0


def write(root: Path, every: Sequence[Mutant], tried: Mapping[Mutant, str]) -> None:
    """Write the record and its page: mutants that were not ``tried`` now keep their outcomes."""
    before = catchers(root)
    outcomes = {each: tried.get(each, before.get(each.name)) for each in every}
    caught_by = {each: caught for each, caught in outcomes.items() if caught is not None}
    folder = root / _FOLDER
    folder.mkdir(exist_ok=True)
    lines = [json.dumps([*each.name, caught_by[each]], ensure_ascii=False) for each in caught_by]
    (folder / "mutants.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files.compress(folder / "mutants.jsonl")
    page = root / f"{_FOLDER}/README.md"
    head, _, _ = page.read_text(encoding="utf-8").partition(_MARK)
    explained = reasons(root)
    survivors = [each for each in caught_by if not caught_by[each]]
    rows = [
        *_table(outcomes, explained, lambda each: each.part),
        "",
        *_table(outcomes, explained, lambda each: f"{each.file} ({each.part})"),
        "",
        "## Survivors",
        "",
        *(_shown(each, explained.get(key(each), "**not explained**")) for each in survivors),
    ]
    page.write_text(f"{head}{_MARK}\n\n" + "\n".join(rows) + "\n", encoding="utf-8")


_MARK = "<!-- what follows is written by `make mutants` -->"


def _shown(mutant: Mutant, because: str) -> str:
    change = f"`{mutant.before}` → `{mutant.after}`".replace("\n", " ")
    return f"- `{mutant.file}`, `{mutant.function or 'module'}`: {change}: {because}"


def _table(
    outcomes: Mapping[Mutant, str | None],
    explained: Mapping[Key, str],
    of: Callable[[Mutant], str],
) -> list[str]:
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for each in outcomes:
        groups[of(each)].append(each)
    rows = [
        "| Mutants | | caught | equivalent | not tried | share caught |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, mutants in groups.items():
        found = [outcomes[each] for each in mutants]
        caught, new = sum(map(bool, found)), found.count(None)
        equal = sum(outcomes[each] == "" and key(each) in explained for each in mutants)
        share = f"{caught / tried:.1%}" if (tried := len(mutants) - equal - new) else ""
        rows.append(f"| {name} | {len(mutants)} | {caught} | {equal} | {new} | {share} |")
    return rows


def reasons(root: Path) -> dict[Key, str]:
    """Reasons why a mutant changes nothing that a test could see."""
    file = root / _FOLDER / "equivalent.yaml"
    entries: Sequence[Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        (entry["file"], entry["function"], before, after): entry["because"]
        for entry in entries
        for before, after in entry["changes"]
    }


def key(mutant: Mutant) -> Key:
    """The mutant's key among reasons."""
    return mutant.file, mutant.function, mutant.before, mutant.after
