"""YAML that remembers its lines, so that a mistake is reported where it stands.

The values are those of ``yaml.safe_load``, but that all keys are text, and that a key given twice
is an error instead of the last one silently winning.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from yaml.constructor import ConstructorError, SafeConstructor

from simulation.quantities import choice

#: Where a value stands: keys of mappings and indices of lists, from the top of the file.
KeyPath = tuple[str | int, ...]

AnySpec = TypeVar("AnySpec", bound=BaseModel)

#: The parser over libyaml, where PyYAML was built with it: a tenth of the time.
_PARSER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE, _TEXT = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


@dataclass(frozen=True)
class Document:
    """One parsed file: its values, and the nodes that know the line of each.

    ``at``, ``spec`` and ``one_of`` check its values, and ``fail`` reports a mistake: a
    ``ValueError`` with file, line and key.
    """

    file: str
    values: Any
    root: yaml.Node
    #: Sources of values that are not from the file, as errors name them.
    given_by: Mapping[KeyPath, str] = field(default_factory=dict)

    def at(self, path: KeyPath) -> Any:
        """The value at a path."""
        value = self.values
        for part in path:
            value = value[part]
        return value

    def spec(self, kind: type[AnySpec], path: KeyPath, **added: Any) -> AnySpec:
        """The mapping at ``path`` as a ``kind``, whose fields in ``added`` a file must not have."""
        section = self.at(path)
        if not isinstance(section, dict) or not section:
            self.fail(path, f"{section!r} is not a mapping with at least one key")
        fields = sorted(kind.model_fields.items(), key=lambda item: not item[1].is_required())
        allowed = [name for name, _ in fields if name not in added]
        for key in section:
            self.one_of(key, allowed, (*path, key), "unknown key")
        try:
            return kind.model_validate({**section, **added}, strict=True)
        except ValidationError as error:
            # Missing keys before wrong ones.
            first = min(error.errors(), key=lambda each: each["type"] != "missing")
            *where, last = first["loc"] or (None,)
            if first["type"] == "missing":
                self.fail((*path, *where), f"{last} is missing")
            self.fail((*path, *first["loc"]), explain(first["input"], first["msg"]))

    def one_of(self, item: Any, allowed: Iterable[str], path: KeyPath, problem: str) -> None:
        """Report an item that is none of these, with the one that it resembles."""
        if not isinstance(item, str) or item not in allowed:
            self.fail(path, f"{problem} {choice(item, allowed)}")

    def fail(self, path: Sequence[str | int], problem: str) -> NoReturn:
        """Raise ``ValueError`` naming the file, the line and the key."""
        raise ValueError(f"{self.place(path)}: {problem}")

    def place(self, path: Sequence[str | int]) -> str:
        """The file, the line and the key; of a value that is not from the file, its source."""
        known = tuple(path)
        for end in range(len(known) + 1):
            if known[:end] in self.given_by:
                return self.given_by[known[:end]]
        where = f": {dotted(path)}" if path else ""
        return f"{self.file}:{self.line(path)}{where}"

    def line(self, path: Sequence[str | int]) -> int:
        """The line of a key or a list item; of one that is missing, of the nearest around it."""
        key = value = self.root
        for part in path:
            key, value = _child(value, part) or (key, value)
        return key.start_mark.line + 1


def dotted(path: Sequence[str | int]) -> str:
    """``("axes", "strategy", 2)`` as ``axes.strategy[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def explain(value: object, message: str) -> str:
    """Pydantic's message on a value, as one sentence that names it."""
    hint = ""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
        hint = f"; YAML reads this as text, write {value.lower().replace('e', '.0e', 1)}"
    message = message.removeprefix("Value error, ")  # of our own validators
    return f"{value!r} is not allowed: {message[:1].lower()}{message[1:]}{hint}"


def load(path: Path) -> Document:
    """Parse a YAML file; ``ValueError`` with file and line if it is not well-formed."""
    content = path.read_bytes()
    try:
        root = yaml.compose(content.decode(), _PARSER)
        if root is None:
            raise ValueError(f"{path.name}:1: the file is empty")
        return Document(path.name, _Constructor().construct_document(root), root)
    except UnicodeDecodeError as error:
        line, problem = content.count(b"\n", 0, error.start), f"not UTF-8 text: {error.reason}"
    except yaml.reader.ReaderError as error:
        line, problem = content.count(b"\n", 0, error.position), f"not valid YAML: {error.reason}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = 0 if mark is None else mark.line, f"not valid YAML: {error.problem}"
    raise ValueError(f"{path.name}:{line + 1}: {problem}")


class _Constructor(SafeConstructor):
    """Makes the values of ``yaml.safe_load`` from nodes; each key is text, and given once."""

    def __init__(self) -> None:
        super().__init__()
        self._checked: set[yaml.Node] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Take over what ``<<`` merges into a mapping, once its own keys are checked."""
        if node not in self._checked:  # an alias leads to the same mapping again
            self._checked.add(node)
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise ConstructorError(None, None, "a key must be text", key.start_mark)
                if key.value in lines:
                    problem = f"{key.value} is a key on line {lines[key.value]} already; keep one"
                    raise ConstructorError(None, None, problem, key.start_mark)
                lines[key.value] = key.start_mark.line + 1
                if key.tag != _MERGE:
                    key.tag = _TEXT
        super().flatten_mapping(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make one value; report one that looks like a date and is none, such as 2026-13-45."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            problem = f"{node.value!r} cannot be read: {error}"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def _child(node: yaml.Node, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """The node of a key or a list item, whose line it has, and that of its value."""
    if isinstance(node, yaml.MappingNode):
        # The last one counts: what is merged comes before a mapping's own keys.
        own_last = reversed(node.value)
        return next(((key, value) for key, value in own_last if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
