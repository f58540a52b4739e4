"""Calls within the library: at most three positional arguments, the others by name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import fcdp

LIBRARY = Path(fcdp.__path__[0])
MOST = 3


def test_no_call_has_more_than_three_positional_arguments() -> None:
    """Calls of the library's own functions, methods and classes count; other packages' do not."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in LIBRARY.rglob("*.py")}
    own = {"cls", *(name for tree in trees.values() for name in defined(tree))}
    calls = [
        f"{path.relative_to(LIBRARY)}:{call.lineno}: {ast.unparse(call)}"
        for path, tree in trees.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and called(call) in own and len(call.args) > MOST
    ]
    assert calls == []


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield names of classes, and of functions but those that take a list of arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef) and node.args.vararg is None
        ):
            yield node.name


def called(call: ast.Call) -> str:
    """Return the last name of what is called: ``store`` of ``self._tiers[tier].store(...)``."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
