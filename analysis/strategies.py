"""Names, colours and order of strategies, the same in every table and figure."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from colorsys import hls_to_rgb
from dataclasses import dataclass, replace
from typing import NamedTuple

from baselines import registry
from baselines.description import Engine, Strategy
from baselines.settings import CacheSettings

#: Strategy that everything is compared with unless the caller says otherwise.
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


class _Family(NamedTuple):
    """The strategies of an engine, or of several, in figures."""

    engines: tuple[Engine, ...]
    #: The dashes of all its lines; hues and markers differ by strategy.
    dashes: Dashes
    #: Range of hues for strategies without a look of their own, in degrees on the colour wheel.
    hues: tuple[int, int]


_FAMILIES = {
    "DeepSpeed": _Family(("deepspeed",), (0, (5, 1.5)), (5, 65)),
    "PyTorch": _Family(("fsdp2", "ddp", "pipeline"), (0, (1.5, 1)), (215, 265)),
    "This engine": _Family(("fcdp",), (0, ()), (275, 335)),
    "Local steps": _Family(("co2",), (0, (3, 1, 1, 1)), (66, 79)),
    "Cyclic": _Family(("cyclic",), (0, (1, 2)), (338, 360)),
    "LuWu": _Family(("luwu",), (0, (6, 1, 1, 1, 1, 1)), (206, 214)),
    "Fuyou": _Family(("fuyou",), (0, (5, 1, 1, 1)), (20, 35)),
}
#: FCDP's variants share the greens with FCDP itself.
_HUES = {name: family.hues for name, family in _FAMILIES.items()} | {SUBJECT: (80, 205)}
#: Lightness and steps of hue make 24 colours per family; neighbours in order are far apart.
_LIGHTNESS = (0.30, 0.62, 0.46)
_STEPS_OF_HUE = (0, 4, 2, 6, 1, 5, 3, 7)
_MARKERS = "^vD<>sPXph*odH8"


def engine(strategy: str) -> str:
    """The name of the engine that a strategy runs on; a variant runs on its strategy's."""
    description = _described(strategy)
    if description is None:
        starts = (each for each in registry.STRATEGIES if strategy.startswith(each.name))
        description = max(starts, key=lambda each: len(each.name), default=None)
    kind: Engine = "fcdp" if description is None else description.engine
    return next(name for name, family in _FAMILIES.items() if kind in family.engines)


def ordered(strategies: Iterable[str]) -> list[str]:
    """The strategies by engine, known ones first, others by name; FCDP and its variants last."""
    known = [each.name for each in registry.STRATEGIES if each.look is not None]
    engines = list(_FAMILIES)

    def place(strategy: str) -> tuple[bool, int, int, str]:
        at = known.index(strategy) if strategy in known else len(known)
        return strategy.startswith(SUBJECT), engines.index(engine(strategy)), at, strategy

    return sorted(set(strategies), key=place)


def styles(strategies: Iterable[str]) -> dict[str, Style]:
    """Styles in display order; up to 24 strategies without a look of their own stay distinct."""
    strategies = ordered(strategies)
    looks: dict[str, Style] = {}
    spare: Counter[str] = Counter()
    taken: dict[str, set[str]] = defaultdict(set)
    declared = {name: s.look for name in strategies if (s := _described(name)) and s.look}
    for name, known in declared.items():
        taken[engine(name)].add(known.marker)
    for strategy in strategies:
        runs_on = engine(strategy)
        if look := declared.get(strategy):
            colour, marker = look.colour, look.marker
        else:
            family = SUBJECT if _is_variant(strategy) else runs_on
            colour, marker = _spare(family, spare[family], taken[runs_on])
            spare[family] += 1
        taken[runs_on].add(marker)
        looks[strategy] = Style(label(strategy), colour, marker, _FAMILIES[runs_on].dashes)
    if SUBJECT in looks and any(map(_is_variant, looks)):
        policy = CacheSettings.model_fields["policy"].default  # beside others', it is named
        looks[SUBJECT] = replace(looks[SUBJECT], label=f"{label(SUBJECT)} {policy}")
    return looks


def is_ablation(baseline: object) -> bool:
    """Whether the baseline is this library itself, with other settings."""
    return isinstance(baseline, str) and (baseline == SUBJECT or _is_variant(baseline))


def _is_variant(strategy: str) -> bool:
    return strategy.startswith(f"{SUBJECT} ")


def _spare(family: str, number: int, taken: set[str]) -> tuple[str, str]:
    """The colour and marker of a family's strategy that has no look of its own, by its number.

    Markers repeat within an engine only where all are ``taken``; the colours then differ.
    """
    first, last = _HUES[family]
    lightness = _LIGHTNESS[number % len(_LIGHTNESS)]
    step = _STEPS_OF_HUE[number % len(_STEPS_OF_HUE)]
    hue = first + (last - first) * step / (len(_STEPS_OF_HUE) - 1)
    red, green, blue = hls_to_rgb(hue / 360, lightness, 0.75)
    colour = "#" + "".join(f"{round(255 * part):02X}" for part in (red, green, blue))
    usual = _MARKERS[number % len(_MARKERS)]
    return colour, next((free for free in _MARKERS if free not in taken), usual)


def by_engine(looks: dict[str, Style]) -> dict[str, dict[str, Style]]:
    """The styles of each engine's strategies, with those of the baseline and the subject beside."""
    everywhere = {BASELINE, SUBJECT}
    return {
        name: {
            strategy: look
            for strategy, look in looks.items()
            if engine(strategy) == name or strategy in everywhere
        }
        for name in _FAMILIES
        if any(engine(strategy) == name for strategy in looks)
    }


def label(strategy: str) -> str:
    """The name that a reader sees; a variant of FCDP has its settings in it."""
    if _is_variant(strategy):
        return f"{label(SUBJECT)} {strategy.removeprefix(SUBJECT).strip()}"
    description = _described(strategy)
    return strategy if description is None else description.label


def _described(strategy: str) -> Strategy | None:
    return next((each for each in registry.STRATEGIES if each.name == strategy), None)
