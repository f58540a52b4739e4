"""Count what readers pay for: lines, modules, imports and tracked bytes, each beside its budget.

    python -m scripts.budgets

Fails where a count has grown past its budget. A budget that is above its aim only falls: a
change that brings a count down writes it here, lines rounded up to the next ten.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("fcdp", "baselines", "simulation", "experiments", "analysis", "scripts")
#: Packages of the product; scripts, which maintain the repository, count apart.
SOURCE = PACKAGES[:-1]


class Budget(NamedTuple):
    """The most that a count may be today, and its target."""

    most: int
    aim: int


BUDGETS = {
    "lines of source": Budget(most=47_360, aim=34_000),
    "lines of fcdp": Budget(most=12_560, aim=7_500),
    "lines of baselines": Budget(most=8_500, aim=6_500),
    "lines of simulation": Budget(most=8_530, aim=6_500),
    "lines of experiments": Budget(most=11_280, aim=8_500),
    "lines of analysis": Budget(most=6_510, aim=5_000),
    "lines of scripts": Budget(most=3_200, aim=3_000),
    "lines of tests": Budget(most=47_240, aim=32_000),
    "imports inside of functions": Budget(most=52, aim=60),
    "modules with one importer": Budget(most=39, aim=40),
    "packages in a circle of imports": Budget(most=0, aim=0),
    "tracked megabytes": Budget(most=30, aim=30),
}


def counts() -> dict[str, int]:
    """Count each thing that has a budget, in the files that git tracks."""
    tracked = [path for path in _tracked() if path.is_file()]
    python = {path: path.read_text(encoding="utf-8") for path in tracked if path.suffix == ".py"}
    lines = {
        folder: sum(text.count("\n") for path, text in python.items() if _in(path, folder))
        for folder in (*PACKAGES, "tests")
    }
    source = [text for path, text in python.items() if any(_in(path, each) for each in PACKAGES)]
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {
        "lines of source": sum(lines[folder] for folder in SOURCE),
        **{f"lines of {folder}": lines[folder] for folder in (*PACKAGES, "tests")},
        "imports inside of functions": sum(map(_imports_in_functions, source)),
        "modules with one importer": sum(1 for _ in _with_one_importer(graph)),
        "packages in a circle of imports": sum(
            len(graph.nominate_cycle_breakers(package)) > 0 for package in PACKAGES
        ),
        "tracked megabytes": round(sum(path.stat().st_size for path in tracked) / 1e6),
    }


def _tracked() -> list[Path]:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def _in(path: Path, folder: str) -> bool:
    return path.is_relative_to(ROOT / folder)


def _imports_in_functions(text: str) -> int:
    """Count statements, each once, whatever functions they are nested in."""
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    imports = (ast.Import, ast.ImportFrom)
    return len(
        {id(node) for each in functions for node in ast.walk(each) if isinstance(node, imports)}
    )


def _with_one_importer(graph: grimp.ImportGraph) -> Iterator[str]:
    """Modules that only one other imports, but for ``__init__`` and ``__main__``."""
    for module in graph.modules:
        is_file = not graph.find_children(module) and not module.endswith("__main__")
        if is_file and len(graph.find_modules_that_directly_import(module)) == 1:
            yield module


def main() -> int:
    """Print the counts; return 1 where one is past its budget."""
    past = []
    print(f"{'count':<34}{'now':>8}{'budget':>9}{'aim':>8}")
    for name, count in counts().items():
        most, aim = BUDGETS[name]
        past += [name] if count > most else []
        print(f"{name:<34}{count:>8,}{most:>9,}{aim:>8,}{'  past its budget' * (count > most)}")
    return 1 if past else 0


if __name__ == "__main__":
    sys.exit(main())
