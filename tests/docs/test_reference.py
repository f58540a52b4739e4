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
from scripts.documentation import SETTING
from tests.ranks import Pools

_FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
#: Of protocols: what others write, and only its class has an example.
_DECLARED = {"CachePolicy.place", "Codec.encoded_bytes", "Codec.encode", "Codec.decode"}
#: Counting is the library's.
_INTERNAL = {
    "Ledger.add",
    "Ledger.add_both",
    "Ledger.hold",
    "Topology.is_beside",
    "Topology.failures",
}


def public() -> Iterator[tuple[str, Any]]:
    for name in fcdp.__all__:
        found = getattr(fcdp, name)
        yield name, found
        if inspect.isclass(found) and name in ("Topology", "Ledger", "Codec", "CachePolicy"):
            for method, member in vars(found).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", getattr(found, method)


PUBLIC = {name: found for name, found in public() if name not in _INTERNAL}
CALLED = {name: found for name, found in PUBLIC.items() if not inspect.isclass(found)}
MADE = ("DiskCache", "Threshold", "Budget", "Auto", "BlockInt8", "BlockInt4")


def sections(found: Any) -> dict[str, str]:
    """The docstring's parts by title, as Google writes them."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(found) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(found: Any) -> list[str]:
    return re.findall(r"^    (\w+): ", sections(found).get("Args", ""), re.MULTILINE)


def test_every_argument_is_described_in_order() -> None:
    for name in (*CALLED, *MADE):
        wanted = [key for key in inspect.signature(PUBLIC[name]).parameters if key != "self"]
        assert described(PUBLIC[name]) == wanted, name


def test_what_is_returned_is_described() -> None:
    for name, found in CALLED.items():
        returned = inspect.signature(found).return_annotation
        assert ("Returns" in sections(found)) == (returned not in (None, "None")), name


def test_what_the_function_itself_raises_is_described() -> None:
    for name in (*CALLED, *MADE):
        source = "\n" + inspect.getsource(PUBLIC[name])
        raised = {
            ast.unparse(node.exc.func)
            for node in ast.walk(ast.parse(inspect.cleandoc(source)))
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        }
        told = re.findall(r"^    (\w+): ", sections(PUBLIC[name]).get("Raises", ""), re.MULTILINE)
        assert raised <= set(told), name
        assert [error for error in told if not error.endswith("Error")] == [], name


def test_each_has_an_example() -> None:
    named = [name for name in PUBLIC if name not in _DECLARED]
    assert [name for name in named if ">>> " not in sections(PUBLIC[name]).get("Example", "")] == []


def run_examples() -> dict[str, str]:
    """Every example of every public name, each from the same setting; what did not come out."""
    failed = {}
    for name in fcdp.__all__:
        found = getattr(fcdp, name)
        # By its own module: one of the package may have the function's name.
        module = importlib.import_module(found.__module__)
        for test in doctest.DocTestFinder(recurse=True).find(found, name, module=module):
            if test.examples:
                said = _run(test)
                if said:
                    failed[test.name] = said
    return failed


def _run(test: doctest.DocTest) -> str:
    said: list[str] = []
    with _folder() as folder:
        scope: dict[str, Any] = {"directory": folder}
        exec(compile(SETTING, "setting", "exec", dont_inherit=True), scope)
        test.globs = scope
        with contextlib.redirect_stderr(io.StringIO()):
            doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=said.append)
    return "".join(said)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """One of rank 0's, for all."""
    with tempfile.TemporaryDirectory() as own:
        shared: list[str | None] = [own]
        dist.broadcast_object_list(shared)
        yield Path(str(shared[0]))
        dist.barrier()


def test_the_examples_come_out_on_two_nodes(ranks: Pools) -> None:
    assert ranks.run(2, run_examples) == [{}, {}]
