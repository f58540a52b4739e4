"""The largest micro-batch that fits: found by running steps, of the one that fits and the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping

#: The micro-batch of the paper's first protocol: always run.
PAPER_MICRO_BATCH = 8
#: Points up to which lines are tried: where they bend often, halving is sooner there.
_LINES = 7


def largest_fitting(peak: Callable[[int], int], usable: int, about_one: int) -> int:
    """The largest micro-batch m with ``peak(m) <= usable`` bytes; 0 if there is none.

    ``peak`` must not fall. It is called for m, m + 1 and few others: it grows piece by piece on
    straight lines, so the next guess is where the line through two points meets the limit.
    ``about_one`` is roughly ``peak(1)``: it decides where to look first, and nothing else.
    """
    known: dict[int, int] = {1: about_one}
    fits, exceeds = 0, None
    guess = PAPER_MICRO_BATCH
    while exceeds != fits + 1:
        known[guess] = peak(guess)
        if known[guess] <= usable:
            fits = guess
        else:
            exceeds = guess
        guess = _guess(known, usable, fits, exceeds)
    return fits


def _guess(known: Mapping[int, int], usable: int, fits: int, exceeds: int | None) -> int:
    """Between what fits and what does not; with no end known, up to sixteen times what fits."""
    if exceeds is not None and len(known) > _LINES:
        return (fits + exceeds) // 2
    most = 16 * fits if exceeds is None else exceeds - 1
    x, x_next = sorted(known)[-2:] if exceeds is None else (fits or 1, exceeds)
    y, y_next = known[x], known[x_next]
    meets = most if y_next <= y else x + (usable - y) * (x_next - x) // (y_next - y)
    return max(fits + 1, min(meets, most))
