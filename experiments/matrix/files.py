"""Matrix files: where they are, and what the command line changes.

A suite is a folder of matrix files; the names of its matrices begin with its own, as in
``paper/volume``. A folder of the user's own runs as one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from simulation.quantities import choice, items
from simulation.yaml_lines import Document, KeyPath

MATRICES = Path(__file__).parents[1] / "matrices"
_ENDINGS = (".yaml", ".yml")


def available() -> list[str]:
    files = MATRICES.rglob("*.yaml")
    return sorted(file.relative_to(MATRICES).with_suffix("").as_posix() for file in files)


def suites() -> list[str]:
    return sorted(folder.name for folder in MATRICES.iterdir() if folder.is_dir())


def find(name_or_path: str) -> Path:
    """The file of a matrix given by its name or by a path; ``ValueError`` if there is none."""
    names = available()
    if name_or_path in names:
        return MATRICES / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.is_dir():
        raise ValueError(f"MATRIX: {name_or_path} is a folder; give one of its files")
    if path.suffix in _ENDINGS or len(path.parts) > 1 or path.exists():
        if not path.is_file():
            raise ValueError(f"MATRIX: there is no file {name_or_path}")
        if path.suffix not in _ENDINGS:
            raise ValueError(
                f"MATRIX: {name_or_path} is no matrix, which is a file that ends in .yaml"
            )
        return path
    allowed = [*names, *suites()]
    raise ValueError(
        f"MATRIX: unknown matrix {choice(name_or_path, allowed, ', or the path of a file')}"
    )


def members(name_or_path: str) -> list[str]:
    """The matrices of a suite, or of a folder of the user's own; of a matrix, itself.

    Raises ``ValueError`` for a folder without matrix files, and for an empty text.
    """
    if not name_or_path:
        raise ValueError("MATRIX: is empty; must be the name of a matrix or a path")
    if name_or_path not in suites():
        folder = Path(name_or_path)
        if name_or_path in available() or not folder.is_dir():
            return [name_or_path]
        paths = sorted(str(file) for file in folder.iterdir() if file.suffix in _ENDINGS)
        if not paths:
            raise ValueError(f"MATRIX: the folder {name_or_path} holds no file that ends in .yaml")
        return paths
    return [name for name in available() if name.startswith(f"{name_or_path}/")]


def parse(texts: Sequence[str]) -> dict[str, Any]:
    """Values by setting, from texts ``SETTING=VALUE``; values are YAML, and a list makes an axis.

    Raises ``ValueError`` naming the option.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise ValueError(f"--set: {text!r} is not a setting and its value, as in steps=10")
        try:
            changes[name.strip()] = yaml.safe_load(_quoted(value))
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(
                f"--set: {value[:80]!r} is not YAML, such as 10 or [host, disk]"
            ) from error
    return changes


def applied(document: Document, changes: Mapping[str, Any]) -> Document:
    """The document with these changes, without rules about values that they remove or set."""
    if not changes or not isinstance(document.values, dict):
        return document
    values = dict(document.values)
    axes, workload = dict(values.get("axes") or {}), dict(values.get("workload") or {})
    given_by: dict[KeyPath, str] = {
        (section, name): f"--set {name}" for section in ("axes", "workload") for name in changes
    }
    for name, value in changes.items():
        if isinstance(value, list):
            workload.pop(name, None)
            axes[name] = value
        elif name in axes:
            axes[name] = [value]
        else:
            workload[name] = value
    values |= {"axes": axes, "workload": workload}
    for section in ("skip", "overrides", "first"):
        rules = [_changed(rule, changes) for rule in values.pop(section, ())]
        if remaining := [rule for rule in rules if rule]:
            values[section] = remaining
    if not workload:
        del values["workload"]
    return replace(document, values=values, given_by=given_by)


def _changed(rule: Any, changes: Mapping[str, Any]) -> Any:
    """The rule without what the changes replace; ``None`` if nothing of it is left."""
    if not isinstance(rule, dict) or not isinstance(rule.get("when"), dict):
        return rule  # the reader says what is wrong with it
    when = dict(rule["when"])
    for name in set(when) & set(changes):
        new = changes[name] if isinstance(changes[name], list) else [changes[name]]
        old = when[name] if isinstance(when[name], list) else [when[name]]
        when[name] = [value for value in old if value in new]
        if not when[name]:
            return None
    rule = {**rule, "when": when}
    if isinstance(rule.get("set"), dict):
        rule["set"] = {name: value for name, value in rule["set"].items() if name not in changes}
        return rule if rule["set"] else None
    return rule


def _quoted(value: str) -> str:
    """The text with calls such as ``budget(device=1 MiB, host=2 MiB)`` as one item of a list."""
    body = value.strip().removeprefix("[").removesuffix("]")
    parts = [part.strip() for part in items(body)]
    if not any("," in part for part in parts):
        return value
    quoted = ", ".join(f'"{part}"' if "," in part else part for part in parts)
    return f"[{quoted}]" if value.strip().startswith("[") else quoted
