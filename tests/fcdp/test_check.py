"""``python -m fcdp.check`` says what a torch does otherwise than FCDP expects."""

import os
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fcdp import check, fsdp2
from fcdp.all_gather import HostGather
from tests.fcdp.training import topology_of
from tests.ranks import on_ranks


@pytest.mark.ranks
def test_the_torch_that_is_installed_does_what_is_expected() -> None:
    command = [sys.executable, "-m", "fcdp.check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout == f"torch {torch.__version__}: FSDP2 does what FCDP expects\n"
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.system
def test_a_check_that_cannot_run_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node is killed, and the other would wait; or there is no such interface."""
    monkeypatch.setattr(check, "problem", lambda topology: os.kill(os.getpid(), 9))
    assert check.main() == 1
    assert capsys.readouterr().out.endswith(
        ": could not run: node 0 ended with -9; could not run: node 1 ended with -9\n"
    )
    monkeypatch.setattr(check, "TIME_LIMIT_S", 2)
    monkeypatch.setattr(check, "problem", lambda topology: time.sleep(60))
    assert check.main() == 1
    assert "node 0 ended with None" in capsys.readouterr().out
    monkeypatch.setattr(check, "TIME_LIMIT_S", 60)
    monkeypatch.undo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    command = [sys.executable, "-m", "fcdp.check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr, run.stdout.count("\n")) == (1, "", 1)
    assert "nowhere9" in run.stdout


class ReadOnly:
    """A property that torch's own code may assign to, and nobody else."""

    def __get__(self, param: Any, kind: type) -> Any:
        return self if param is None else vars(param)["sum"]

    def __set__(self, param: Any, value: Any) -> None:
        if not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            raise AttributeError("property 'unsharded_accumulated_grad' has no setter")
        vars(param)["sum"] = value


@on_ranks(2)
def test_a_property_without_a_setter_is_found() -> None:
    """As that of torch 2.15, which took an attribute's place."""
    name = "unsharded_accumulated_grad"
    with mock.patch.object(fsdp2, "_SUM_APART", new=True):
        if isinstance(getattr(FSDPParam, name, None), property):
            problem = check.problem(topology_of(2, 1))
        else:
            with mock.patch.object(FSDPParam, name, ReadOnly(), create=True):
                problem = check.problem(topology_of(2, 1))
    assert problem is not None
    assert problem.startswith("an error inside of an accumulation: AttributeError: property ")
    assert problem.count("\n") == 0


@on_ranks(2)
def test_a_hook_that_is_called_with_another_argument_is_found() -> None:
    def call(self: Any, output_tensor: Any, input_tensor: Any, group: Any) -> None:
        raise NotImplementedError

    with mock.patch.object(HostGather, "__call__", call):
        problem = check.problem(topology_of(2, 1))
    assert problem is not None
    assert "TypeError" in problem
    assert "unexpected keyword argument 'async_op'" in problem


@on_ranks(2)
def test_a_hook_that_gives_another_result_is_found() -> None:
    begin = fsdp2.FSDPState._pre_forward

    def pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        return (*begin(self, module, args, kwargs), "more")

    with mock.patch.object(fsdp2.FSDPState, "_pre_forward", pre_forward):
        problem = check.problem(topology_of(2, 1))
    assert problem is not None
    assert problem.startswith("a gradient in early micro batches only: RuntimeError: forward pre-")


@on_ranks(2)
def test_another_meaning_of_no_reduce_dtype_is_found() -> None:
    other = not fsdp2._FOLLOWS_GRAD_DTYPE
    with mock.patch.object(fsdp2, "_FOLLOWS_GRAD_DTYPE", new=other):
        problem = check.problem(topology_of(2, 1))
    assert problem is not None
    assert problem.startswith(
        "the dtype of reductions: AssertionError: reduce_dtype=None reduces in {'"
    )
