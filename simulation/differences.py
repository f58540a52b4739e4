"""Bytes of lossless differences: how much of a shard one optimizer step changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Bits per bf16 parameter by learning rate of AdamW, as the kernel's counters saw them in
#: ``results/delta`` (emulated); ``tests/docs/test_figures.py`` holds them against it.
MEASURED: Sequence[tuple[float, float]] = (
    (1e-6, 0.42),
    (1e-5, 1.3),
    (3e-5, 2.1),
    (1e-4, 2.9),
    (1e-3, 5.1),
)
#: Bits of a bf16 parameter; of wider ones all others are sent as they are.
_TOLD = 16


def bits(learning_rate: float, element_bytes: int) -> float:
    """Bits per parameter that a gather sends after a step of this learning rate.

    On the logarithms' line between what was measured, and never more than the parameter itself.
    Raises ``ValueError`` for a learning rate that is not positive.
    """
    if not learning_rate > 0:
        raise ValueError(f"learning_rate = {learning_rate!r}: must be more than 0")
    points = [(math.log(rate), math.log(told)) for rate, told in MEASURED]
    at = math.log(learning_rate)
    # Beyond the ends the line of the last two goes on.
    index = sum(at >= place for place, _ in points[1:-1])
    (x0, y0), (x1, y1) = points[index : index + 2]
    told = math.exp(y0 + (at - x0) / (x1 - x0) * (y1 - y0))
    return min(told, _TOLD) + 8 * element_bytes - _TOLD
