"""The sections of a matrix file, each checked where it is read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from simulation.yaml_lines import Document, KeyPath

AnySpec = TypeVar("AnySpec", bound=BaseModel)


class Sections:
    """Reads a document; a mistake is a ``ValueError`` with the file, the line and the key."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def fail(self, path: KeyPath, problem: str) -> NoReturn:
        """Raise ``ValueError`` about what stands at ``path``."""
        self._document.fail(path, problem)

    def place(self, path: KeyPath) -> str:
        """The file, the line and the key of what stands at ``path``."""
        return self._document.place(path)

    def spec(self, kind: type[AnySpec], path: KeyPath, **added: Any) -> AnySpec:
        """The mapping at ``path`` as a ``kind``, of which ``added`` is not for the file to give."""
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
        """Fail unless ``item`` is one of ``allowed``."""
        if not isinstance(item, str) or item not in allowed:
            self.fail(path, f"{problem} {_choose(item, allowed)}")

    def at(self, path: KeyPath) -> Any:
        """Whatever is at ``path``."""
        value = self._document.values
        for part in path:
            value = value[part]
        return value


def _choose(item: object, allowed: Iterable[str]) -> str:
    names = list(allowed)
    close = get_close_matches(str(item), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{item!r}; allowed: {', '.join(names)}{hint}"


def explain(value: object, message: str) -> str:
    """What pydantic says of a value, as one sentence that names it."""
    hint = ""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
        hint = f"; YAML reads this as text, write {value.lower().replace('e', '.0e', 1)}"
    message = message.removeprefix("Value error, ")  # what a validator of our own says
    return f"{value!r} is not allowed: {message[:1].lower()}{message[1:]}{hint}"
