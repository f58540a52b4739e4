"""How each strategy is called, coloured and ordered, the same in every table and figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: What everything is compared with unless the caller says otherwise.
BASELINE = "deepspeed-zero3"
#: The strategy whose gains the figures annotate and the report's headlines state.
SUBJECT = "fcdp"

#: Matplotlib's offset and dashes of a line.
Dashes = tuple[int, tuple[float, ...]]


@dataclass(frozen=True)
class Style:
    """A strategy's look."""

    label: str
    colour: str
    marker: str
    dashes: Dashes


# One hue and one kind of line an engine, one marker a strategy: warm and dashed, blue and dotted,
# purple and solid; FCDP alone is green. The three main ones have Okabe and Ito's colours, which
# stay apart under the common colour-vision deficiencies; markers say the same in black and white.
_LINES: dict[str, Dashes] = {
    "DeepSpeed": (0, (5, 1.5)),
    "PyTorch": (0, (1.5, 1)),
    "This engine": (0, ()),
}
_LOOKS = {
    "deepspeed-zero3": ("#D55E00", "s"),
    "deepspeed-hpz": ("#E69F00", "D"),
    "deepspeed-hpz-offload": ("#8C3B00", "X"),
    "deepspeed-offload": ("#F0904F", "v"),
    "deepspeed-offload-param": ("#A67C00", "<"),
    "deepspeed-infinity": ("#5C2E00", ">"),
    "deepspeed-qwz": ("#FFB000", "P"),
    "deepspeed-qgz": ("#C04000", "p"),
    "deepspeed-zeropp": ("#7A5C00", "h"),
    "deepspeed-mics": ("#B35900", "*"),
    "deepspeed-mics-hierarchical": ("#A0522D", "d"),
    "fsdp2": ("#0072B2", "^"),
    "fsdp2-hsdp": ("#56B4E9", "D"),
    "fsdp2-reshard": ("#003F6B", "s"),
    "fsdp2-offload": ("#7B9FC4", "v"),
    "ddp": ("#4D4D4D", "P"),
    "zero3": ("#CC79A7", "s"),
    "hpz": ("#882255", "D"),
    "qwz": ("#AA4499", "v"),
    "qgz": ("#5B3F8C", "<"),
    "zeropp": ("#9C86CF", "P"),
    "fcdp": ("#009E73", "o"),
}
_SPARE = (
    ("#8C7A00", ">"),
    ("#7F7F7F", "X"),
    ("#000000", "h"),
    ("#44AA99", "d"),
    ("#117733", "p"),
    ("#B2B200", "*"),
)
_LABELS = {"deepspeed-zero3": "DeepSpeed ZeRO-3", "fsdp2": "FSDP2", "fcdp": "FCDP"}


def engine(strategy: str) -> str:
    """The engine that a strategy runs on, as a reader knows it."""
    if strategy.startswith("deepspeed"):
        return "DeepSpeed"
    return "PyTorch" if strategy.startswith(("fsdp2", "ddp")) else "This engine"


def ordered(strategies: Iterable[str]) -> list[str]:
    """By engine, known strategies first, others by name; FCDP and its variants last."""
    known, engines = list(_LOOKS), list(_LINES)

    def place(strategy: str) -> tuple[bool, int, int, str]:
        at = known.index(strategy) if strategy in known else len(known)
        return strategy.startswith(SUBJECT), engines.index(engine(strategy)), at, strategy

    return sorted(set(strategies), key=place)


def styles(strategies: Iterable[str]) -> dict[str, Style]:
    """Each strategy's style, in display order; strategies not named above share spare colours."""
    looks: dict[str, Style] = {}
    spare = 0
    for strategy in ordered(strategies):
        if strategy in _LOOKS:
            colour, marker = _LOOKS[strategy]
        else:
            colour, marker = _SPARE[spare % len(_SPARE)]
            spare += 1
        looks[strategy] = Style(label(strategy), colour, marker, _LINES[engine(strategy)])
    return looks


def by_engine(looks: dict[str, Style]) -> dict[str, dict[str, Style]]:
    """The styles of each engine's strategies, with those of the baseline and the subject beside."""
    everywhere = {BASELINE, SUBJECT}
    return {
        name: {
            strategy: look
            for strategy, look in looks.items()
            if engine(strategy) == name or strategy in everywhere
        }
        for name in _LINES
        if any(engine(strategy) == name for strategy in looks)
    }


def label(strategy: str) -> str:
    """The name that a reader sees."""
    return _LABELS.get(strategy, strategy)
