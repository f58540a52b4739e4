"""Names in the matrices that come with the repository, read from their files alone."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from simulation.quantities import format_link, link
from simulation.yaml_lines import load


@cache
def named() -> Mapping[str, Mapping[str, frozenset[str]]]:
    """Strategies, models and links of each matrix's cells, by its name, as tables write them.

    A suite's matrices have its name before their own. Raises ``ValueError`` for a file that is not
    well-formed YAML.
    """
    with as_file(files("experiments") / "matrices") as folder:
        by_matrix = {
            path.relative_to(folder).with_suffix("").as_posix(): _names(path)
            for path in folder.rglob("*.yaml")
        }
    return dict(sorted(by_matrix.items()))


def names(matrix: str) -> Mapping[str, frozenset[str]]:
    """Names in one matrix; where it has no file, the strategies of all others.

    Models and links of a matrix without a file are up to its command.
    """
    by_matrix = named()
    if matrix in by_matrix:
        return by_matrix[matrix]
    return {"strategy": frozenset().union(*(of["strategy"] for of in by_matrix.values()))}


def _names(path: Path) -> dict[str, frozenset[str]]:
    content = load(path).values
    return {
        "strategy": frozenset(_values(content, "strategy")),
        "model": frozenset(model["name"] for model in content["models"]),
        "link": frozenset(format_link(link(each)) for each in _values(content, "inter_bandwidth")),
    }


def _values(content: Mapping[str, Any], setting: str) -> Iterator[str]:
    rules = content.get("overrides", ())
    for section in (content.get("workload", {}), content["axes"], *(rule["set"] for rule in rules)):
        values = section.get(setting, ())
        yield from [values] if isinstance(values, str) else values
