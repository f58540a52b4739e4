"""How each strategy is called, coloured and ordered, the same in every table and figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baselines import registry

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


# One kind of line per engine; hues and markers are the strategies' own.
_LINES: dict[str, Dashes] = {
    "DeepSpeed": (0, (5, 1.5)),
    "PyTorch": (0, (1.5, 1)),
    "This engine": (0, ()),
    "Local steps": (0, (3, 1, 1, 1)),
}
_ENGINES: dict[registry.Engine, str] = {
    "deepspeed": "DeepSpeed",
    "fsdp2": "PyTorch",
    "ddp": "PyTorch",
    "fcdp": "This engine",
    "co2": "Local steps",
}
_SPARE = (
    ("#8C7A00", ">"),
    ("#7F7F7F", "X"),
    ("#000000", "h"),
    ("#44AA99", "d"),
    ("#117733", "p"),
    ("#B2B200", "*"),
)


def engine(strategy: str) -> str:
    """The engine that a strategy runs on, as a reader knows it; of a variant, its strategy's."""
    found = _described(strategy)
    if found is None:
        starts = (each for each in registry.STRATEGIES if strategy.startswith(each.name))
        found = max(starts, key=lambda each: len(each.name), default=None)
    return _ENGINES["fcdp" if found is None else found.engine]


def ordered(strategies: Iterable[str]) -> list[str]:
    """By engine, known strategies first, others by name; FCDP and its variants last."""
    known = [each.name for each in registry.STRATEGIES if each.look is not None]
    engines = list(_LINES)

    def place(strategy: str) -> tuple[bool, int, int, str]:
        at = known.index(strategy) if strategy in known else len(known)
        return strategy.startswith(SUBJECT), engines.index(engine(strategy)), at, strategy

    return sorted(set(strategies), key=place)


def styles(strategies: Iterable[str]) -> dict[str, Style]:
    """Each strategy's style, in display order; strategies not named above share spare colours."""
    looks: dict[str, Style] = {}
    spare = 0
    for strategy in ordered(strategies):
        found = _described(strategy)
        if found is not None and found.look is not None:
            colour, marker = found.look.colour, found.look.marker
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
    found = _described(strategy)
    return strategy if found is None else found.label


def _described(strategy: str) -> registry.Strategy | None:
    return next((each for each in registry.STRATEGIES if each.name == strategy), None)
