"""Ranges in a profiler's timeline: what each part of a step is, and of which unit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.autograd.profiler
from torch.profiler import record_function

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named(part: str, of: str = "") -> AbstractContextManager[Any]:
    """Name what the body does ``fcdp::part of``, if a profiler runs: names cost more than it."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return record_function(f"fcdp::{part} {of}".rstrip())
