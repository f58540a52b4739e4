"""Formats of numbers and settings in tables and figures."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from experiments.records.comparison import Comparison
from experiments.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

#: Shown where a cell has no value.
ABSENT = "–"

TUNINGS = {"full": "full fine-tuning", "lora": "LoRA"}

EVIDENCE = {
    "measured": "measured on real nodes",
    "emulated": "the nodes are network namespaces on one host, their links shaped; times "
    "are wall-clock times there, bytes the kernel's interface counters",
    "simulated": "computed by the cost model; nothing was run",
}


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] | None = None
) -> str:
    """A Markdown table: columns in ``words``, by default the first, flush left, others right."""
    left = head[:1] if words is None else words
    rule = f"|{'|'.join('---' if name in left else '--:' for name in head)}|"
    top, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([top, rule, *others])


def markdown(frame: "pd.DataFrame", words: Collection[str] | None = None) -> str:
    """A Markdown table of a frame, with its cells escaped."""
    rows = ([*map(escaped, row)] for row in frame.itertuples(index=False))
    return table([*map(str, frame.columns)], rows, words)


def escaped(value: object) -> str:
    """A cell's text, escaped so that it cannot break its row of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, never in exponent form for everyday sizes."""
    if value is None or math.isnan(value):
        return ABSENT
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    scientific = f"{value:.{digits - 1}e}"
    if abs(value) < 1e-4:
        return scientific
    # The exponent after rounding: 99.96 has three digits as 100, not as 100.0.
    places = digits - 1 - int(scientific.partition("e")[2])
    return f"{float(scientific):,.{max(places, 0)}f}"


def times(value: float | None) -> str:
    """A ratio such as ``3.0×``."""
    text = number(value, 2 if value is not None and value < 99.5 else 3)
    return text if text == ABSENT else f"{text}×"


def gain(speed: Sequence[float]) -> str:
    """A speed-up, from itself and its interval's ends; not significant with 1 between these."""
    of, low, high = speed
    return "not significant" if low <= 1 <= high else times(of)


def speed_up(*speed: float) -> str:
    """A speed-up with its interval, such as ``2.6× (2.5–2.7)``; alone if that is a point."""
    ends = (times(end).removesuffix("×") for end in speed[1:])
    return gain(speed) + _ends(ends)


def compared(speed: Comparison) -> str:
    """The speed-up of two cells with its interval; a dash where one has no speed."""
    return speed_up(speed.ratio, *speed.interval) if speed.ratio and speed.interval else ABSENT


def share(speed: Comparison) -> str:
    """The share of a speed that is kept, such as ``18 % (17–18)``."""
    ends = (percent(end).removesuffix(" %") for end in speed.interval or ())
    return f"{percent(speed.ratio)}{_ends(ends)}"


def _ends(of: Iterable[str]) -> str:
    ends = dict.fromkeys(of)
    return f" ({'–'.join(ends)})" if len(ends) > 1 else ""


def percent(value: float | None) -> str:
    """A share such as ``30 %``."""
    if value is None or math.isnan(value):
        return ABSENT
    return f"{number(value * 100, 2 if value < 1 else 3)} %"


def _written(form: str) -> Callable[[float | None], str]:
    return lambda value: ABSENT if value is None or math.isnan(value) else form.format(value)


#: A deviation that is in per cent already.
signed_percent = _written("{:+.2f} %")
#: A loss, to the digits in which strategies may differ; and a difference of two.
loss, signed_loss = _written("{:.4f}"), _written("{:+.4f}")


def metric(of: Metric, value: float | None) -> str:
    """A metric's value in the format that the record's schema declares."""
    return ABSENT if value is None or math.isnan(value) else of.written(value)


def spread(mean: float, deviation: float, form: str, unit: str = "") -> str:
    """A mean and its standard deviation, such as ``0.24 ± 0.01``; one value stands alone."""
    if math.isnan(mean):
        return ABSENT
    if math.isnan(deviation):
        return f"{mean:{form}}{unit}"
    return f"{mean:{form}} ± {deviation:{form.lstrip('+')}}{unit}"


def megabytes(value: float | None) -> str:
    """Bytes in units of 10^6."""
    return number(None if value is None else value / 1e6)


def count(value: float | None) -> str:
    """Parameters, in millions where there are many."""
    if value is None or math.isnan(value):
        return ABSENT
    return f"{number(value / 1e6)} M" if value >= 1e5 else f"{value:,.0f}"


_SHOW = {"times": times, "percent": percent, "ratio": number, "whole": "{:,.0f}".format}


def one_or_range(values: Iterable[float], show: str = "times") -> str:
    """``2.0× to 3.1×``, or the one value where all read the same."""
    shown = _SHOW[show]
    present = sorted(value for value in values if not math.isnan(value))
    if not present:
        return ABSENT
    low, high = shown(present[0]), shown(present[-1])
    return low if low == high else f"{low} to {high}"
