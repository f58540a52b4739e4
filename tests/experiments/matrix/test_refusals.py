"""Refusals and skips: every reason, with its file, line and key.

``refusals.txt`` has a case for each. A line names a matrix of ``tests.experiments.matrix.files``,
the cluster if it is another, and changes: ``OLD => NEW``, or ``+ LINE`` in the workload. The lines
below it are the error, or the reasons of the cells that are skipped. ``python -m
tests.experiments.matrix.test_refusals`` writes what the reader says today: read the difference.
"""

import ast
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

from baselines import pins, registry
from baselines.pins import Pin
from experiments.matrix import reader
from experiments.matrix.files import parse
from experiments.records import allowed
from experiments.records.cell import ClusterSpec
from tests.experiments import families
from tests.experiments.cells import cell
from tests.experiments.golden import cases, tables
from tests.experiments.matrix.files import FILES, TUNING

GOLDEN = Path(__file__).with_name("refusals.txt")
#: The reader's message by the line of the case.
CASES = cases(GOLDEN)
#: Files beside the matrix, by what is wrong with them.
BESIDE = tables(__file__)
BESIDE["qwen/config.json"] = json.dumps(families.configuration("qwen2"))
RENTED = ClusterSpec(kind="rented", nodes=4, ranks_per_node=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("matrix"))


def filled(folder: Path) -> Path:
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def said(case: str, folder: Path) -> list[str]:
    """The message about a refused file, or the reasons of the cells that are skipped."""
    where, *changes = case.replace("\\n", "\n").split(" | ")
    name, _, kind = where.partition(" on ")
    text, file = FILES[name], folder / "example.yaml"
    given = [each.removeprefix("--set ") for each in changes if each.startswith("--set ")]
    for change in changes:
        old, _, new = change.partition(" => ")
        if change.startswith("+ "):
            old, new = TUNING, f"{TUNING}\n  {change.removeprefix('+ ')}"
        if not change.startswith("--set "):
            assert old in text, old
            text = text.replace(old, new, 1)
    file.write_text(text, encoding="utf-8")
    cluster = RENTED if kind == "rented" else None
    try:
        matrix = reader.read(
            str(file), cluster, simulated=kind == "simulated", changes=parse(given)
        )
    except ValueError as error:
        return [str(error).replace(str(folder), "HERE")]
    return sorted({f"skipped: {reason}" for reason in matrix.skipped.values()})


@pytest.mark.parametrize("case", CASES)
def test_a_reason_has_its_place_and_says_what_is_allowed(case: str, folder: Path) -> None:
    assert said(case, folder) == CASES[case]


def test_no_reason_is_without_a_case() -> None:
    """Every text of the module of reasons that a matrix file can meet is in some message."""
    tree = ast.parse(Path(allowed.__file__).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    elsewhere = ("why_not_installed", "why_too_large")  # below, and the command's
    texts = {
        node.value
        for function in functions
        if function.name not in elsewhere
        for statement in function.body[1 if ast.get_docstring(function) else 0 :]
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    }
    messages = "\n".join(message for says in CASES.values() for message in says)
    messages += "; there is no sklearn here"  # test_images.py
    assert len(texts) > 40
    assert sorted(text for text in texts if text not in messages) == []


@pytest.mark.parametrize("like", ["fsdp2", "fcdp"])
def test_a_strategy_without_a_schedule_may_hold_a_packed_base(like: str) -> None:
    added = replace(registry.find(like), name="added", schedule=None)
    with mock.patch.object(registry, "STRATEGIES", (*registry.STRATEGIES, added)):
        of = cell("added", tuning="lora", dtype="bfloat16", frozen_dtype="nf4")
        assert [*allowed.mismatches(of)] == []


def why_not(name: str, pin: Pin = "current", *, cuda: bool = True) -> str | None:
    return allowed.why_not_installed(registry.find(name), pin, cuda=cuda)


def test_what_a_machine_lacks_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = "needs about 2 GB, and this machine has 500 MB: make it smaller (--set), or"
    assert (allowed.why_too_large(2e9, 5e8) or "").startswith(small)
    header = tmp_path / "libaio.h"
    infinity = replace(registry.find("deepspeed-infinity"), needs_header=(header, "libaio-dev"))
    missing = f"{header} is missing: sudo apt-get install libaio-dev"
    assert allowed.why_not_installed(infinity, "current", cuda=True) == missing
    header.touch()
    assert allowed.why_not_installed(infinity, "current", cuda=True) is None
    monkeypatch.setattr(pins, "version", {"current": "0.19.6", "paper": None}.get)
    assert why_not("fcdp") is None
    assert why_not("fsdp2", "paper") == "fsdp2 does not use DeepSpeed, so it has one pin only"
    assert why_not("fsdp2-hierarchical", cuda=False) is None
    assert "over NCCL fsdp2 has NCCL's own" in str(why_not("fsdp2-hierarchical"))
    missing = "DeepSpeed (paper) is not installed: make baselines"
    assert why_not("deepspeed-hpz", "paper") == missing
    assert why_not("deepspeed-qwz") is None
    for name in ("deepspeed-qwz", "deepspeed-qgz", "deepspeed-zeropp", "deepspeed-mics"):
        assert str(why_not(name, cuda=False)).startswith("DeepSpeed 0.19.6 ")
    monkeypatch.setattr(pins, "version", lambda pin: None)
    assert why_not("deepspeed-hpz") == "DeepSpeed (current) is not installed: make setup"


if __name__ == "__main__":
    with TemporaryDirectory() as empty:
        here = filled(Path(empty))
        lines = [
            line for case in CASES for line in (case, *(f"    {says}" for says in said(case, here)))
        ]
    GOLDEN.write_text("\n".join(lines) + "\n", encoding="utf-8")
