"""Users' functions, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast


def find(name: str, where: str) -> Callable[..., Any]:
    """The function "package.module:function" that the matrix file names at ``where``.

    Raises ``ValueError`` where there is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(
            f"{where}: {module} cannot be imported: {error}; each node imports it from the folder "
            "that ranks start in, this repository's, or from installed packages"
        ) from error
    if not callable(found):
        raise ValueError(f"{where}: {module} has no function {function!r}")
    return cast(Callable[..., Any], found)
