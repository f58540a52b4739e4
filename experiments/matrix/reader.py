"""A matrix file and the cells it expands to.

The file is YAML: ``axes`` that are multiplied, ``workload`` constants, ``skip`` rules with their
reasons, and ``overrides`` that change constants for some of the cells. Any setting of a cell may
be an axis or a constant. ``reference`` names the strategy whose losses all others must reach;
``repeats`` says how often each cell runs, 1 by default, and ``first`` has rules of the cells that
run before others. A mistake raises ``ValueError`` naming the file, the line and the key. What a
cell may be, ``experiments.records.allowed`` says.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

from pydantic import Field, StringConstraints, ValidationError

from baselines import encoding, registry
from experiments.matrix.files import applied, find
from experiments.matrix.workloads import Workloads
from experiments.records import allowed
from experiments.records.abilities import ABILITIES, Evidence
from experiments.records.allowed import LARGEST, OF_CLUSTER
from experiments.records.cell import FILE_NAMES, AnyCluster, Cell, ClusterSpec, SimulatedSpec
from simulation import quantities
from simulation.files import Strict
from simulation.yaml_lines import AnySpec, Document, KeyPath, explain, load

_FIELD_NAMES = {file: field for field, file in FILE_NAMES.items()}
#: All settings that a file may give so; matrix and cluster are the same for all cells.
SETTINGS = (
    *OF_CLUSTER,
    *(
        FILE_NAMES.get(field, field)
        for field in Cell.model_fields
        if field not in ("matrix", "cluster", "settings", "origin", "repeat")
    ),
    *registry.setting_names(),
)
_AtLeastOne = Field(min_length=1)


class _Skip(Strict):
    """A rule of cells that are not run, and why."""

    when: Annotated[dict[str, Any], _AtLeastOne]
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class _Override(Strict):
    """A rule that changes constants for some of the cells."""

    when: Annotated[dict[str, Any], _AtLeastOne]
    set: Annotated[dict[str, Any], _AtLeastOne]


class _First(Strict):
    """A rule of cells that run before those of later rules and of none."""

    when: Annotated[dict[str, Any], _AtLeastOne]


class MatrixFile(Strict):
    """The keys of a matrix file; their values are checked later, where their types are known."""

    name: str
    description: str
    cluster: Any
    models: Annotated[list[Any], _AtLeastOne]
    axes: Annotated[dict[str, Annotated[list[Any], _AtLeastOne]], _AtLeastOne]
    reference: str | None = None
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    workload: Annotated[dict[str, Any], _AtLeastOne] | None = None
    skip: Annotated[list[Any], _AtLeastOne] | None = None
    overrides: Annotated[list[Any], _AtLeastOne] | None = None
    first: Annotated[list[Any], _AtLeastOne] | None = None


@dataclass(frozen=True)
class Matrix:
    """An expanded matrix: its cells in the order in which they run."""

    name: str
    description: str
    cluster: AnyCluster
    cells: tuple[Cell, ...]
    #: Reasons of the cells that are skipped, by their ids.
    skipped: Mapping[str, str]
    #: Whether its cells are simulated, whatever the kind of the cluster.
    simulated: bool = False
    #: The strategy whose losses all others must reach, if they are to be compared.
    reference: str | None = None

    @property
    def running(self) -> list[Cell]:
        """The cells that are not skipped."""
        return [cell for cell in self.cells if cell.id not in self.skipped]

    @property
    def evidence(self) -> Evidence:
        if self.simulated:
            return "simulated"
        return self.cluster.can.evidence


@dataclass(frozen=True)
class _Value:
    """A value of a setting and where the file gives it."""

    value: Any
    path: KeyPath


#: Values by setting: a rule applies to the cells that have them.
_When = Mapping[str, Sequence[Any]]


def read(
    name_or_path: str,
    cluster: ClusterSpec | None = None,
    *,
    simulated: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Matrix:
    """Read a matrix file and expand it to its cells, for another cluster than its own if given.

    With ``simulated`` cells are simulated, whatever the cluster: what this machine lacks is then no
    reason to skip one. ``changes`` are settings and their values in place of the file's.

    Cells that differ only in their strategy follow one another, so that a drift of the machine
    meets all strategies of a comparison alike.
    """
    path = find(name_or_path)
    document = applied(load(path), changes)
    return _Expansion(document, path.parent, cluster, simulated).matrix()


class _Expansion:
    """Checks a matrix file and multiplies its axes."""

    def __init__(
        self, document: Document, folder: Path, cluster: ClusterSpec | None, simulated: bool
    ) -> None:
        self._file = document
        self._top = self._file.spec(MatrixFile, ())
        own_cluster = self._cluster_spec()
        self._cluster = cluster or own_cluster
        if cluster is not None and isinstance(own_cluster, ClusterSpec):
            self._cluster = cluster.model_copy(update={"port": own_cluster.port})
        self._simulated = simulated or not self._cluster.can.start_processes
        self._workloads = Workloads(self._file, folder)
        #: Values of each setting; a constant has one.
        self._settings = {name: self._values(("axes", name), SETTINGS) for name in self._top.axes}
        constants = self._single_values(("workload",), SETTINGS) if self._top.workload else {}
        for setting in constants.keys() & self._settings.keys():
            self._file.fail(("workload", setting), "is an axis already; keep one of the two")
        self._settings |= {name: [value] for name, value in constants.items()}
        for field, info in Cell.model_fields.items():
            setting = FILE_NAMES.get(field, field)
            if setting in SETTINGS and info.is_required() and setting not in self._settings:
                self._file.fail((), f"{setting} is missing; give it in workload or in axes")
        strategies = [each.value for each in self._settings["strategy"]]
        self._require_a_strategy_for_each(strategies)
        if self._top.reference is not None:
            problem = "not in this matrix:"
            self._file.one_of(self._top.reference, strategies, ("reference",), problem)
        self._skips = [
            (rule.reason, self._when((*path, "when"))) for path, rule in self._rules("skip", _Skip)
        ]
        constant = [setting for setting in SETTINGS if setting not in self._top.axes]
        self._overrides = [
            (self._single_values((*path, "set"), constant), self._when((*path, "when")))
            for path, _ in self._rules("overrides", _Override)
        ]
        self._first = [self._when((*path, "when")) for path, _ in self._rules("first", _First)]

    def matrix(self) -> Matrix:
        # The strategy varies fastest, whatever the order in the file.
        order = sorted(self._settings, key=lambda setting: setting == "strategy")
        cells: dict[str, Cell] = {}
        skipped: dict[str, str] = {}
        turns: dict[str, int] = {}
        cuda = registry.has_cuda()
        for values in itertools.product(*(self._settings[setting] for setting in order)):
            assignment = dict(zip(order, values, strict=True))
            left_out = [reason for reason, when in self._skips if _matches(when, assignment)]
            try:
                cell = self._cell(assignment)
            except ValueError:
                if left_out:  # a combination that no cell can have needs no record either
                    continue
                raise
            why = next(iter(left_out), None) or (
                allowed.why_not_simulated(cell)
                if self._simulated
                else allowed.why_not_here(cell, cuda=cuda)
            )
            # A setting that its strategy does not have gives the same cell again, which runs if
            # one of these combinations does.
            cell_id = cell.id
            turns[cell_id] = min(self._turn(assignment), turns.get(cell_id, len(self._first)))
            if cell_id not in cells or cell_id in skipped:
                cells[cell_id] = cell
                skipped.pop(cell_id, None)
                if why is not None:
                    skipped[cell_id] = why
        matrix = Matrix(
            name=self._top.name,
            description=self._top.description,
            cluster=self._cluster,
            cells=tuple(sorted(cells.values(), key=lambda cell: turns[cell.id])),
            skipped=skipped,
            simulated=self._simulated,
            reference=self._top.reference,
        )
        return replace(matrix, cells=(*matrix.cells, *self._repeated(matrix.running)))

    def _turn(self, assignment: Mapping[str, _Value]) -> int:
        """The place of the first rule of ``first`` that names the cell; that of no rule is last."""
        matching = (n for n, when in enumerate(self._first) if _matches(when, assignment))
        return next(matching, len(self._first))

    def _repeated(self, cells: Sequence[Cell]) -> Iterator[Cell]:
        """The cells again and again in alternating order: a drift meets none more than others."""
        for repeat in range(1, 1 if self._simulated else self._top.repeats):
            for cell in reversed(cells) if repeat % 2 else cells:
                yield cell.model_copy(update={"repeat": repeat})

    def _cell(self, assignment: Mapping[str, _Value]) -> Cell:
        settings = dict(assignment)
        for change, when in self._overrides:
            if _matches(when, assignment):
                settings.update(change)
        fields = {_FIELD_NAMES.get(name, name): setting.value for name, setting in settings.items()}
        largest = fields["micro_batch"] == LARGEST
        if largest:
            fields["micro_batch"] = 1
        cluster: dict[str, Any] = self._cluster.model_dump()
        cluster |= {name: fields.pop(name) for name in OF_CLUSTER if name in fields}
        paths = {name: setting.path for name, setting in settings.items()}
        fields["origin"] = self._workloads.origin(fields["model"], paths)
        fields["model"] = self._workloads.models[fields["model"]]
        try:
            cell = Cell.of(**fields, matrix=self._top.name, cluster=cluster)
        except ValidationError as error:
            first = error.errors()[0]
            # A cluster's field follows its kind.
            field = str(first["loc"][-1 if first["loc"][0] == "cluster" else 0])
            self._refuse(field, explain(first["input"], first["msg"]), settings)
        for field, reason in allowed.mismatches(cell):
            self._refuse(field, reason, settings)
        return _with_largest_micro_batch(cell) if largest else cell

    def _refuse(self, field: str, reason: str, settings: Mapping[str, _Value]) -> NoReturn:
        setting = FILE_NAMES.get(field, field)
        self._file.fail(settings[setting].path if setting in settings else (setting,), reason)

    def _cluster_spec(self) -> AnyCluster:
        section = self._file.at(("cluster",))
        if isinstance(section, dict) and "kind" in section:
            self._file.one_of(section["kind"], ABILITIES, ("cluster", "kind"), "unknown kind")
            if section["kind"] == "simulated":
                return self._file.spec(SimulatedSpec, ("cluster",))
        nodes = self._file.spec(ClusterSpec, ("cluster",))
        for field, reason in allowed.mismatches_of_nodes(nodes):
            self._file.fail(("cluster", field), reason)
        return nodes

    def _values(self, path: KeyPath, known: Iterable[str]) -> list[_Value]:
        """Values of a setting: those of a list, without duplicates, or a single one."""
        self._file.one_of(path[-1], known, path, "unknown key")
        node = self._file.at(path)
        values: list[_Value] = []
        for place in [(*path, i) for i in range(len(node))] if isinstance(node, list) else [path]:
            item = self._file.at(place)
            value = self._value(str(path[-1]), item, place)
            if value in (earlier.value for earlier in values):
                self._file.fail(place, f"{item!r} is already in this list")
            values.append(_Value(value, place))
        return values

    def _single_values(self, path: KeyPath, known: Sequence[str]) -> dict[str, _Value]:
        values = {}
        for setting, item in self._file.at(path).items():
            place = (*path, setting)
            self._file.one_of(setting, known, place, "unknown key")
            values[setting] = _Value(self._value(setting, item, place), place)
        return values

    def _require_a_strategy_for_each(self, strategies: Sequence[str]) -> None:
        """Fail for a setting that no strategy of the matrix has."""
        have = {name for each in strategies for name in registry.find(each).settings.model_fields}
        for section in ("axes", "workload"):
            keys = getattr(self._top, section) or ()
            for name in set(keys) & {*registry.setting_names()} - have:
                others = [of.name for of in registry.STRATEGIES if name in of.settings.model_fields]
                problem = f"no strategy of this matrix has it; those that do: {', '.join(others)}"
                self._file.fail((section, name), problem)

    def _value(self, setting: str, item: Any, path: KeyPath) -> Any:
        """The value as a cell holds it; its type is checked when the cells are made."""
        if setting == "strategy":
            self._file.one_of(item, registry.STRATEGY_NAMES, path, "unknown strategy")
        elif setting == "model":
            self._file.one_of(item, self._workloads.models, path, "unknown model")
        elif setting in ("data", "optimizer", "objective", "loss"):
            return getattr(self._workloads, setting)(path)
        try:
            if setting in ("inter_bandwidth", "inter_group_bandwidth"):
                return quantities.link(item)
            if (why := allowed.why_not_given(setting, item, self._cluster)) is not None:
                raise ValueError(why)
            if setting in ("policy", "gather_codec", "reduce_codec"):
                # Imports torch, which most matrices need not wait for.
                from fcdp.cache import named

                readers = {"policy": named.parse, "gather_codec": encoding.gather}
                readers.get(setting, encoding.reduction)(str(item))
        except ValueError as error:
            self._file.fail(path, str(error))
        return item

    def _rules(self, section: str, kind: type[AnySpec]) -> Iterator[tuple[KeyPath, AnySpec]]:
        for i in range(len(getattr(self._top, section) or ())):
            yield (section, i), self._file.spec(kind, (section, i))

    def _when(self, path: KeyPath) -> _When:
        when: dict[str, list[Any]] = {}
        for setting in self._file.at(path):
            values = self._values((*path, setting), self._settings)
            known = [each.value for each in self._settings[setting]]
            for each in values:
                if each.value not in known:
                    problem = f"{self._file.at(each.path)!r} is not a value of {setting}"
                    self._file.fail(each.path, f"{problem} in this matrix")
            when[setting] = [each.value for each in values]
        return when


def _matches(when: _When, assignment: Mapping[str, _Value]) -> bool:
    return all(assignment[setting].value in values for setting, values in when.items())


def _with_largest_micro_batch(cell: Cell) -> Cell:
    # Imports numpy, which a matrix that is not simulated need not wait for.
    from experiments.clusters.simulated import largest_micro_batch

    if allowed.why_not_simulated(cell) is not None:
        return cell
    return cell.model_copy(update={"micro_batch": max(1, largest_micro_batch(cell))})
