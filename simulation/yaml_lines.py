"""YAML that remembers its lines, so that a mistake is reported where it stands.

The values are those of ``yaml.safe_load``, except that a key given twice is an error instead of
the last one silently winning.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

_Loader = type[yaml.SafeLoader | yaml.CSafeLoader]
#: The loader over libyaml, where PyYAML was built with it: a tenth of the time.
_QUICK: _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: Levels of mappings and lists, and values with those that aliases repeat, of the largest file.
_DEEPEST, _MOST = 20, 100_000

#: Where a value stands: keys of mappings and indices of lists, from the top of the file.
KeyPath = tuple[str | int, ...]


def dotted(path: Sequence[str | int]) -> str:
    """``("axes", "strategy", 2)`` as ``axes.strategy[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Document:
    """One parsed file: its values, and the line of each key and list item."""

    file: str
    values: Any
    lines: dict[KeyPath, int]
    #: Sources of values that are not from the file, as errors name them.
    given_by: Mapping[KeyPath, str] = field(default_factory=dict)

    def fail(self, path: Sequence[str | int], problem: str) -> NoReturn:
        """Raise ``ValueError`` naming the file, the line and the key."""
        shown = (sign if sign.isprintable() else repr(sign)[1:-1] for sign in problem)
        raise ValueError(f"{self.place(path)}: {''.join(shown)}")

    def place(self, path: Sequence[str | int]) -> str:
        """The file, the line and the key.

        A key that is missing has no line; the line is then that of the nearest key around it. A
        value that is not from the file has its source as its place.
        """
        known = tuple(path)
        for end in range(len(known) + 1):
            if known[:end] in self.given_by:
                return self.given_by[known[:end]]
        while known and known not in self.lines:
            known = known[:-1]
        where = f": {dotted(path)}" if path else ""
        return f"{self.file}:{self.lines[known]}{where}"


def load(path: Path) -> Document:
    """Parse a YAML file; ``ValueError`` with file and line if it is not well-formed."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path.name}:{line}: not UTF-8 text: {error.reason}") from error
    try:
        with contextlib.suppress(yaml.YAMLError):  # the other loader has plainer words for it
            return _parsed(path.name, text, _QUICK)
        return _parsed(path.name, text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise ValueError(f"{path.name}:{line}: not valid YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{path.name}:{line}: not valid YAML: {error.reason}") from error


def _parsed(file: str, text: str, kind: _Loader) -> Document:
    _check_depth(file, text, kind)
    loader = kind(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ValueError(f"{file}:1: the file is empty")
        reader = _Reader(file, loader)
        return Document(file, reader.value(root, ()), reader.lines)
    finally:
        loader.dispose()


def _check_depth(file: str, text: str, kind: _Loader) -> None:
    """Raise ``ValueError`` for what is nested deeper than Python, or C, can follow."""
    depth = 0
    for event in yaml.parse(text, kind):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ValueError(f"{file}:{line}: nested too deeply; allowed are {_DEEPEST} levels")


class _Reader:
    """Turns YAML nodes into values and notes the line of each path."""

    def __init__(self, file: str, loader: yaml.SafeLoader | yaml.CSafeLoader) -> None:
        #: Line of each key and list item, by its path.
        self.lines: dict[KeyPath, int] = {}
        self._file = file
        self._loader = loader
        #: Number of values so far, those that aliases repeat included.
        self._values = 0
        #: Nodes around the current one: an alias to one of them has no finite value.
        self._around: list[yaml.Node] = []
        #: Mappings whose merge keys are resolved; an alias leads to the same mapping again.
        self._flattened: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._values += 1
        if self._values > _MOST:
            self._fail(node, path, f"aliases repeat too much; allowed are {_MOST:,} values")
        if node in self._around:
            self._fail(node, path, f"the alias contains itself (anchor on line {self._line(node)})")
        self._around.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._loader.construct_object(node, deep=True)
        except ValueError as error:
            # A scalar that looks like a date or a number and is none, such as 2026-13-45.
            if isinstance(node, yaml.ScalarNode):
                self._fail(node, path, f"{node.value!r} cannot be read: {error}")
            raise
        finally:
            self._around.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        if node not in self._flattened:
            self._flattened.append(node)
            self._refuse_duplicates(node, path)
            self._loader.flatten_mapping(node)
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            place = (*path, key)
            self.lines[place] = self._line(key_node)
            values[key] = self.value(value_node, place)
        return values

    def _refuse_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        written: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key_node.tag == "tag:yaml.org,2002:merge":  # counted before it is repeated
                self.value(value_node, (*path, key))
            if key in written:
                self._fail(
                    key_node, (*path, key), f"this key is already on line {written[key]}; keep one"
                )
            written[key] = self._line(key_node)

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._fail(node, path, "a key must be text")
        return str(node.value)

    def _line(self, node: yaml.Node) -> int:
        return node.start_mark.line + 1

    def _fail(self, node: yaml.Node, path: KeyPath, problem: str) -> NoReturn:
        where = f"{dotted(path)}: " if path else ""
        raise ValueError(f"{self._file}:{self._line(node)}: {where}{problem}")
