"""How each strategy is called, coloured and ordered, the same in every table and figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: What everything is compared with unless the caller says otherwise.
BASELINE = "deepspeed-zero3"
#: The strategy whose gains the figures annotate and the report's headlines state.
SUBJECT = "fcdp"


@dataclass(frozen=True)
class Style:
    """A strategy's look."""

    label: str
    colour: str
    marker: str


# Okabe and Ito's colours stay apart under the common colour-vision deficiencies; markers say the
# same again for black-and-white print.
_KNOWN = {
    "deepspeed-zero3": Style("DeepSpeed ZeRO-3", "#D55E00", "s"),
    "fsdp2": Style("FSDP2", "#0072B2", "^"),
    "fcdp": Style("FCDP", "#009E73", "o"),
}
_SPARE = (
    ("#E69F00", "D"),
    ("#CC79A7", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
    ("#8C7A00", "<"),
    ("#7F7F7F", ">"),
)


def ordered(strategies: Iterable[str]) -> list[str]:
    """Known baselines first, other strategies by name, FCDP and its variants last."""
    known = list(_KNOWN)

    def place(strategy: str) -> tuple[int, int, str]:
        if strategy.startswith(SUBJECT):
            return (2, 0, strategy)
        return (0, known.index(strategy), "") if strategy in known else (1, 0, strategy)

    return sorted(set(strategies), key=place)


def styles(strategies: Iterable[str]) -> dict[str, Style]:
    """Each strategy's style, in display order; strategies not named above share spare colours."""
    looks: dict[str, Style] = {}
    spare = 0
    for strategy in ordered(strategies):
        if strategy in _KNOWN:
            looks[strategy] = _KNOWN[strategy]
            continue
        colour, marker = _SPARE[spare % len(_SPARE)]
        looks[strategy] = Style(strategy, colour, marker)
        spare += 1
    return looks


def label(strategy: str) -> str:
    """The name that a reader sees."""
    return _KNOWN[strategy].label if strategy in _KNOWN else strategy
