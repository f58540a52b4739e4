"""Least squares with constants that cannot be negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def not_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Fit by least squares; what would be negative is nought, and the rest is fitted again."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1
    kept = np.arange(features.shape[1])
    while True:
        solution, *_ = np.linalg.lstsq(features[:, kept] / scale[kept], target, rcond=None)
        if (solution >= 0).all():
            break
        kept = kept[solution >= 0]
    found = np.zeros(features.shape[1])
    found[kept] = solution / scale[kept]
    return [float(value) for value in found]
