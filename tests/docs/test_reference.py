"""Docstrings of the library: every argument, what is returned and raised, an example that runs."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

import fcdp
from fcdp.public import __all__ as public_names
from scripts.documentation import SETTING
from tests.docs import table
from tests.ranks import Pools

_FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
#: Methods of protocols, which others write: only the class has an example.
_DECLARED = {"CachePolicy.place", "Codec.encoded_bytes", "Codec.encode", "Codec.decode"}
#: Methods that only the library calls.
_INTERNAL = {
    "Ledger.add",
    "Ledger.add_both",
    "Ledger.hold",
    "Topology.is_beside",
    "Topology.part",
    "Topology.shape_of",
    "Topology.failures",
}


def public() -> Iterator[tuple[str, Any]]:
    for name in fcdp.__all__:
        obj = getattr(fcdp, name)
        yield name, obj
        if inspect.isclass(obj) and name in ("Topology", "Ledger", "Codec", "CachePolicy"):
            for method, member in vars(obj).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", getattr(obj, method)


PUBLIC = {name: obj for name, obj in public() if name not in _INTERNAL}
CALLED = {name: obj for name, obj in PUBLIC.items() if not inspect.isclass(obj)}
_OPTIONS = ("CacheOptions", "CommOptions")
MADE = (*_OPTIONS, "DiskCache", "Threshold", "Budget", "Auto", "BlockInt8", "BlockInt4")


def sections(obj: Any) -> dict[str, str]:
    """The docstring's parts by title, as Google writes them."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(obj) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(obj: Any) -> list[str]:
    return re.findall(r"^    (\w+): ", sections(obj).get("Args", ""), re.MULTILINE)


def test_every_argument_is_described_in_order() -> None:
    for name in (*CALLED, *MADE):
        expected = [key for key in inspect.signature(PUBLIC[name]).parameters if key != "self"]
        assert described(PUBLIC[name]) == expected, name


def test_what_is_returned_is_described() -> None:
    for name, obj in CALLED.items():
        returned = inspect.signature(obj).return_annotation
        assert ("Returns" in sections(obj)) == (returned not in (None, "None")), name


def test_what_the_function_itself_raises_is_described() -> None:
    for name in (*CALLED, *MADE):
        source = "\n" + inspect.getsource(PUBLIC[name])
        raised = {
            ast.unparse(node.exc.func)
            for node in ast.walk(ast.parse(inspect.cleandoc(source)))
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        }
        errors = re.findall(r"^    (\w+): ", sections(PUBLIC[name]).get("Raises", ""), re.MULTILINE)
        assert raised <= set(errors), name
        assert [error for error in errors if not error.endswith("Error")] == [], name


def test_each_has_an_example() -> None:
    named = [name for name in PUBLIC if name not in _DECLARED]
    assert [name for name in named if ">>> " not in sections(PUBLIC[name]).get("Example", "")] == []


def test_each_is_called_stable_or_not_once() -> None:
    rows = table("reference.md", "stability")
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row["Names of `fcdp`"])]
    assert sorted(named) == sorted([*public_names, "integrations"])
    assert [row["In a minor version"] for row in rows] == ["stable", "experimental"]


def run_examples() -> dict[str, str]:
    """Run all examples of public names, each after the same set-up; return the failures."""
    failed = {}
    for name in fcdp.__all__:
        obj = getattr(fcdp, name)
        # By its own module: one of the package may have the function's name.
        module = importlib.import_module(obj.__module__)
        for test in doctest.DocTestFinder(recurse=True).find(obj, name, module=module):
            if test.examples:
                failure = _run(test)
                if failure:
                    failed[test.name] = failure
    return failed


def _run(test: doctest.DocTest) -> str:
    output: list[str] = []
    with _folder() as folder:
        scope: dict[str, Any] = {"directory": folder}
        exec(compile(SETTING, "setting", "exec", dont_inherit=True), scope)
        test.globs = scope
        with contextlib.redirect_stderr(io.StringIO()):
            doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=output.append)
    return "".join(output)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder of rank 0 that all ranks use."""
    with tempfile.TemporaryDirectory() as folder:
        shared: list[str | None] = [folder]
        dist.broadcast_object_list(shared)
        yield Path(str(shared[0]))
        dist.barrier()


def test_the_examples_come_out_on_two_nodes(ranks: Pools) -> None:
    assert ranks.run(2, run_examples) == [{}, {}]
