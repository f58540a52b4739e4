"""Settings of cells, for all that names, compares or shows cells.

Ids, groups of compared cells, their baselines, columns of tables, panels and captions of figures,
claims and the parity check read here the annotations of a cell's fields and of its strategy's
settings. A field without one raises ``TypeError``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baselines import registry
from baselines.settings import Place, Role, Setting

_PLACES = get_args(Place)


@dataclass(frozen=True)
class Parts:
    """Annotation of a field whose own fields are settings, of which ``named`` takes its name.

    With ``None`` they are the settings of the cell's strategy.
    """

    named: str | None = None


@dataclass(frozen=True)
class Described:
    """A setting under the name that columns and claims use."""

    name: str
    setting: Setting
    #: The pandas dtype of a column of its values.
    kind: str
    #: Names of the fields that lead to it from a cell.
    path: tuple[str, ...]
    #: Its value in comparisons for cells whose strategy does not have it.
    default: Any = None

    def of(self, cell: BaseModel) -> Any:
        """Its plain value in a cell; ``None`` where the cell has no such setting."""
        value: Any = cell
        for part in self.path:
            value = getattr(value, part, None)
        return value.model_dump_json() if isinstance(value, BaseModel) else value

    def written(self, value: Any) -> str:
        """A value in words, also where there is none."""
        # NaN, by which tables write what is missing, does not equal itself.
        missing = value is None or value != value
        return self.setting.absent if missing else self.setting.write(value)


@cache
def described(cell: type[BaseModel]) -> Mapping[str, Described]:
    """All settings of this type of cell in the order of its fields."""
    by_name: dict[str, Described] = {}
    for name, field in cell.model_fields.items():
        for item in _of_field(cell, name, field):
            by_name.setdefault(item.name, item)
    return by_name


def names(cell: type[BaseModel], *roles: Role, place: Place | None = None) -> list[str]:
    """The settings of these roles, and of this place if given, in the order of places."""
    chosen = [
        item
        for item in described(cell).values()
        if item.setting.role in roles and place in (None, item.setting.place)
    ]
    chosen.sort(key=lambda item: _PLACES.index(item.setting.place))
    return [item.name for item in chosen]


def values(cell: BaseModel, chosen: Collection[str]) -> dict[str, Any]:
    """The plain values of these settings in a cell, by name."""
    by_name = described(type(cell))
    return {name: by_name[name].of(cell) for name in chosen}


def left_out_of_id(cell: BaseModel) -> dict[str, Any]:
    """Fields that an id does not depend on, as ``model_dump`` takes them."""
    excluded: dict[str, Any] = {}
    for name, field in type(cell).model_fields.items():
        setting = _setting(type(cell), name, field)
        value = getattr(cell, name)
        if not isinstance(setting, Setting):
            if parts := left_out_of_id(value):
                excluded[name] = parts
        elif setting.in_id == "never" or (setting.in_id == "later" and value == field.default):
            excluded[name] = True
    return excluded


def _setting(owner: type[BaseModel], name: str, field: FieldInfo) -> Setting | Parts:
    settings = [item for item in field.metadata if isinstance(item, Setting | Parts)]
    if len(settings) != 1:
        raise TypeError(
            f"{owner.__name__}.{name} must say once what it is to ids, comparisons and tables: "
            "Annotated[..., Setting(...)]"
        )
    return settings[0]


def _of_field(owner: type[BaseModel], name: str, field: FieldInfo) -> list[Described]:
    setting = _setting(owner, name, field)
    if isinstance(setting, Parts):
        kinds = _types(field.annotation) if setting.named else registry.settings_types()
        return _of_parts(name, setting.named, kinds)
    (kind, *_) = _types(field.annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        # By its name, which is unique in a matrix, and by all that the name stands for.
        full = replace(setting, label=f"{setting.label} in full", always=True)
        return [
            Described(name, setting, "string", (name, "name")),
            Described(f"{name}_in_full", full, "string", (name,)),
        ]
    return [Described(name, setting, column(field.annotation), (name,))]


def _of_parts(name: str, named: str | None, kinds: Collection[Any]) -> list[Described]:
    """Settings of a field that is one of several types, each with fields of its own."""
    settings = []
    for kind in kinds:
        for part, field in kind.model_fields.items():
            setting = _setting(kind, part, field)
            assert isinstance(setting, Setting), "parts have no parts"
            values = column(field.annotation)
            if values == "Int64" and not all(part in other.model_fields for other in kinds):
                values = "float64"
            known_as = name if part == named else part
            default = field.default if named is None else None
            settings.append(Described(known_as, setting, values, (name, part), default))
    return settings


def _types(annotation: Any) -> list[Any]:
    return [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]


def column(annotation: Any) -> str:
    """The pandas dtype for values of this type; a number that may be missing is a float."""
    kinds = _types(annotation)
    if kinds == [bool]:
        return "boolean"
    if kinds == [int]:
        return "float64" if type(None) in get_args(annotation) else "Int64"
    return "float64" if kinds == [float] else "string"
