"""Lists of docs/reference.md: the keys of a matrix file, from the types that read them.

What a key means is the comment above its field, or above the name of its field's type; where there
is none, its label.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, get_args

from pydantic import BaseModel

from baselines import registry
from baselines.settings import Setting
from experiments.matrix.reader import SETTINGS
from experiments.matrix.workloads import OBJECTIVES
from experiments.records import objective
from experiments.records.cell import FILE_NAMES, Cell, ClusterSpec, SimulatedSpec

_REQUIRED = "–"
#: Keys that the file has in another form than a cell: what they take, and their defaults.
_IN_A_FILE = {
    "strategy": ("a [strategy](strategies.md)", _REQUIRED),
    "model": ("a name of `models`", _REQUIRED),
    "inter_bandwidth": ("such as `10 Mbit/s`, or `unshaped`", _REQUIRED),
    "inter_group_bandwidth": ("such as `10 Mbit/s`, or `unshaped`", "`unshaped`"),
    "micro_batch": ("an integer ≥ 1; simulated, also `max`, the largest that fits", _REQUIRED),
    "optimizer": ("a mapping, below", "`{kind: adamw}`"),
    "data": ("a mapping, below", "`{library: python}`"),
    "objective": ("a mapping, below", "`{kind: causal-lm}`"),
    "loss": ("`cross entropy`, or `package.module:function`", "`cross entropy`"),
}
_TYPES = {"integer": "an integer", "number": "a number", "string": "text", "null": "`null`"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def of_cells() -> str:
    """Keys that all cells have: one line for each that axes and workload take."""
    names = {name: FILE_NAMES.get(name, name) for name in Cell.model_fields}
    rows = _rows(Cell, {name: file for name, file in names.items() if file in SETTINGS})
    return _list(rows)


def of_strategies() -> str:
    """Lists of the settings of some strategies alone, one for those that have the same."""
    tables: dict[str, dict[str, list[str]]] = {}
    for kind in registry.settings_types():
        for row in _rows(kind):
            key = row[0].strip("`")
            have = [each for each in registry.STRATEGIES if key in each.settings.model_fields]
            # Their defaults may differ.
            row[2] = ", ".join(dict.fromkeys(_default(each.settings, key) for each in have))
            tables.setdefault(_either(each.name for each in have), {}).setdefault(key, row)
    return "\n\n".join(f"{of}:\n\n{_list(rows.values())}" for of, rows in tables.items())


def of_clusters() -> str:
    rows = [["`kind`", "`emulated`, `rented`, `simulated`", "`emulated`", "Where cells run", "all"]]
    for kind, of in ((ClusterSpec, "emulated, rented"), (SimulatedSpec, "simulated")):
        for row in _rows(kind):
            if same := next((each for each in rows if each[0] == row[0]), None):
                same[-1] = "all"
            else:
                rows.append([*row, of])
    return _list(
        [*row, meaning if of == "all" else f"{meaning} ({of})"] for *row, meaning, of in rows
    )


def of_objectives() -> str:
    """A line for each kind of objective with what it is given by, but for models."""
    kinds = [(f"`kind: {name}`", kind) for name, kind in OBJECTIVES.items()]
    lines = []
    for name, kind in [*kinds, ("A user's own", objective.OwnObjective)]:
        keys = [each for each in kind.model_fields if each not in ("kind", "teacher")]
        if not keys:
            continue
        lines += [f"- {name}: {'; '.join(_items(_rows(kind, {each: each for each in keys})))}"]
    return "\n".join(lines)


#: Fields that the reader adds to the file's.
_ADDED = ("configuration", "digest")


def of_kinds(union: Any) -> str:
    """A list per type of a union, under what it is."""
    parts, earlier = [], []
    for kind in get_args(union):
        rows = _rows(kind, {name: name for name in kind.model_fields if name not in _ADDED})
        # A row that an earlier kind has word for word is said once.
        told = ", ".join(row[0] for row in rows if row in earlier)
        said = _as_markdown(inspect.cleandoc(kind.__doc__ or "")) + (told and f" {told}: as above.")
        parts.append(f"{said}\n\n{_list(row for row in rows if row not in earlier)}")
        earlier += rows
    return "\n\n".join(parts)


def _list(rows: Iterable[Sequence[str]]) -> str:
    """A line per key."""
    return "\n".join(f"- {item}" for item in _items(rows))


def _items(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Each key, its values and default in brackets, and its meaning."""
    for key, value, default, meaning in rows:
        values = value if default == _REQUIRED else f"{value}; {default}"
        says_more = meaning.lower() != key.strip("`").replace("_", " ")
        yield f"{key} ({values})" + (f": {meaning}" if meaning and says_more else "")


def _rows(kind: type[BaseModel], names: Mapping[str, str] | None = None) -> list[list[str]]:
    """Key, value, default and meaning of fields, by the names that a file has for them."""
    schema = kind.model_json_schema(mode="validation")
    found = []
    for name, key in (names or {name: name for name in kind.model_fields}).items():
        value, default = _IN_A_FILE.get(key, (None, None)) if kind is Cell else (None, None)
        if value is None or default is None:
            value = _value(schema["properties"][name], schema.get("$defs", {}))
            default = _default(kind, name)
        found.append([f"`{key}`", value, default, _meaning(kind, name)])
    return found


def _value(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> str:
    """Values that JSON Schema allows, in words."""
    if "$ref" in schema:
        return f"{{{_value(defined[schema['$ref'].rpartition('/')[2]], defined)}}}"
    if "anyOf" in schema:
        return ", or ".join(_value(each, defined) for each in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return _either(schema["enum"])
    if schema["type"] == "boolean":
        return "`true`, `false`"
    if schema["type"] == "object":
        fields = schema["properties"].items()
        return "; ".join(f"`{name}`: {_value(each, defined)}" for name, each in fields)
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([_TYPES[schema["type"]], " and ".join(bounds)]).strip()


def _default(kind: type[BaseModel], name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return _REQUIRED
    value = field.default
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _meaning(kind: type[BaseModel], name: str) -> str:
    """The comment on a field, or on its type's name; else its label, or nothing."""
    for owner in kind.__mro__:
        if name in inspect.get_annotations(owner):
            module = sys.modules[owner.__module__]
            said, annotation = _comments(module)[f"{owner.__name__}.{name}"]
            return said or _comments(module).get(annotation, ("", ""))[0] or _label(kind, name)
    raise AssertionError(f"no class declares {kind.__name__}.{name}")


def _label(kind: type[BaseModel], name: str) -> str:
    said = (item for item in kind.model_fields[name].metadata if isinstance(item, Setting))
    return next((item.label for item in said), "")


@cache
def _comments(module: ModuleType) -> dict[str, tuple[str, str]]:
    """The comment above each name and field of a module, and a field's type as it is written."""
    source = inspect.getsource(module)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        for owner, each in ((node, item) for item in getattr(node, "body", [node])):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            if isinstance(each, ast.AnnAssign):
                found[prefix + ast.unparse(each.target)] = (
                    _above(lines, each.lineno),
                    ast.unparse(each.annotation),
                )
            elif isinstance(each, ast.Assign):
                found[prefix + ast.unparse(each.targets[0])] = (_above(lines, each.lineno), "")
    return found


def _above(lines: list[str], number: int) -> str:
    """The comment that ends above a line, as a cell of a table has it."""
    said: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not line.strip().startswith("#:"):
            break
        said.insert(0, line.strip().removeprefix("#:").strip())
    return _as_markdown(" ".join(said)).rstrip(".")


def _as_markdown(words: str) -> str:
    return words.replace("``None``", "`null`").replace("``", "`")


def _either(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)
