"""Loops are compiled when they first run, and also where nothing can be cached."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from numba.core import caching

from fcdp.delta.compiled import compiled


def _sum(values: np.ndarray[Any, Any]) -> int:
    total = 0
    for value in values:
        total += value
    return total


def _printed(program: str, **variables: str) -> str:
    command, environment = [sys.executable, "-c", program], {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return ended.stdout


@pytest.mark.ranks
def test_nothing_is_compiled_before_it_runs() -> None:
    imported = "import sys, fcdp.engine, fcdp.delta.difference; print('numba' in sys.modules)"
    assert _printed(imported) == "False\n"


@pytest.mark.system
def test_once_all_is_prepared_no_exchange_waits_for_the_compiler(tmp_path: Path) -> None:
    program = """
import torch
from numba.core import event
from fcdp.delta import difference, message

def told():
    for coding in ("packed", "entropy", "ordered"):
        for most in (1, 3, 100, 300):
            new, base = torch.randn(5000).bfloat16(), torch.randn(5000).bfloat16()
            words = base.view(torch.int16) + torch.randint(-most, most, (5000,))
            new.view(torch.int16).copy_(words)
            message.read(message.write(new, base, 1, coding=coding), base, 1)
    message.read(message.write(new, None, message.ALONE), base, message.ALONE)

with event.install_recorder("numba:compile") as compilations:
    difference.prepare()
    before = len(compilations.buffer)
    told()
    print(before > 0, len(compilations.buffer) == before)
"""
    assert _printed(program, NUMBA_CACHE_DIR=str(tmp_path)) == "True True\n"


def test_a_loop_is_that_of_python() -> None:
    loop = compiled(_sum)
    assert [loop(np.arange(count)) for count in (0, 5)] == [0, 10]


def test_a_package_that_is_missing_is_asked_for_by_the_name_of_the_extra() -> None:
    loop = compiled(_sum)
    asked = pytest.raises(ValueError, match=r'need numba.*: pip install "fcdp\[differences\]"')
    with mock.patch.dict(sys.modules, {"numba": None}), asked:
        loop(np.arange(5))
    assert loop(np.arange(5)) == 10


def test_it_runs_where_no_folder_can_keep_it() -> None:
    compiler, options = numba.njit, []

    def njit(*, nogil: bool, cache: bool = False) -> Any:
        options.append((nogil, cache))
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiler(nogil=nogil)

    loop = compiled(_sum)
    with mock.patch.object(numba, "njit", njit):
        assert [loop(np.arange(count)) for count in (0, 5)] == [0, 10]
    assert options == [(True, True), (True, False)]


def test_it_runs_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(caching.FunctionCache, "save_overload", side_effect=full) as save:
        loop = compiled(_sum)
        assert [loop(np.arange(count)) for count in (0, 5)] == [0, 10]
    save.assert_called_once()
