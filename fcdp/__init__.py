"""Fully Cached Data Parallel (arXiv 2602.06499) for any FSDP2 model.

ZeRO-3 that keeps gathered parameters in the node's host memory: a layer crosses the slow network
between nodes once a step and is rebuilt inside the node afterwards; frozen parameters cross once.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fcdp.public import *  # noqa: F403
else:
    #: Modules here, which are imported by themselves: ``fcdp.sizes`` needs no torch.
    _MODULES = {module.name for module in iter_modules(__path__)}  # noqa: F405

    def __getattr__(name: str) -> object:
        """Import the public names, and torch, with the first use of one."""
        if name == "__all__" or not (name.startswith("_") or name in _MODULES):
            public = import_module("fcdp.public")
            if name in ("__all__", *public.__all__):
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*globals(), *import_module("fcdp.public").__all__]
