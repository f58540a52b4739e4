"""Loops over arrays on the host as machine code, and the packages that only differences need."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.int16]
#: 64 bits at a time.
Longs = NDArray[np.uint64]
#: Numbers that a byte holds.
Near = NDArray[np.int8]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def extra(name: str) -> Any:
    """Import a package of the wheel's extra when it is used: most runs have no codec.

    Raises ``ValueError`` that names the extra where the package is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"fcdp.Delta, fcdp.Exact and compressed publications need {name}, which cannot be "
            f'imported ({error}): pip install "fcdp[differences]"'
        ) from error


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile a function of arrays and numbers when it is called first.

    It runs without Python's lock. What was compiled is kept beside the source, or in the user's
    cache where that cannot be written: later processes begin with it.
    """

    @functools.cache
    def loop() -> Callable[_P, _R]:
        compiler = extra("numba")
        try:
            made: Callable[_P, _R] = compiler.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # neither place can be written
            made = compiler.njit(nogil=True)(function)
        return made

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return loop()(*args, **kwargs)
        except OSError:  # a full disk keeps nothing, but it is compiled
            return loop()(*args, **kwargs)

    return call
