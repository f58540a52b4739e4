"""Every field of a cell says once what it is, and all that compares and shows cells reads it."""

from typing import Annotated, Any, get_args

import pytest

from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.drawings import panels_of
from analysis.load.provenance import provenance
from analysis.report import run
from baselines import registry
from baselines.optimizers import SGD, AdamW
from baselines.settings import CacheSettings
from experiments.records import parity
from experiments.records.cell import Cell, ClusterSpec, SimulatedSpec
from experiments.records.objective import DPO
from experiments.records.settings import Described, Setting, described
from experiments.records.workload import Library, Origin, TextFile
from experiments.terminal.summary_table import summary, varying_settings
from tests.analysis import made_up
from tests.analysis.made_up import GPT2, LLAMA, record
from tests.experiments.command_line import rendered

IN_GROUPS = ClusterSpec(nodes=2, ranks_per_node=2, groups=2)
#: Other values of settings that do not take just any value.
OTHERS: dict[str, dict[str, Any]] = {
    "gpu": {"gpu": "a10g"},
    "inter_efficiency": {"inter_efficiency": 0.4},  # by default that of both links
    "cluster": {"cluster": ClusterSpec(nodes=2, ranks_per_node=2)},
    "groups": {"cluster": IN_GROUPS},
    "cores": {"cluster": ClusterSpec(nodes=2, ranks_per_node=2, cores="own")},
    "model": {"model": LLAMA},
    "model_in_full": {"model": GPT2.model_copy(update={"vocabulary": 512})},
    "tuning": {"tuning": "lora"},
    "strategy": {"strategy": "zero3"},
    # FCDP has no such setting.
    "deepspeed": {"strategy": "deepspeed-zero3", "deepspeed": "paper"},
    "exchanges": {"exchanges": "undeferred"},
    "data": {"data": TextFile(text="prose.txt", digest="0" * 64)},
    "data_in_full": {"data": Library(tokenizer="qwen")},
    "optimizer": {"optimizer": SGD(kind="sgd")},
    "optimizer_in_full": {"optimizer": AdamW(beta2=0.98)},
    "loss": {"loss": "package.module:function"},
    "objective": {"objective": DPO(kind="dpo")},
    "objective_in_full": {"objective": DPO(kind="dpo", beta=0.5)},
    "origin": {"origin": Origin(folder="examples")},
    "origin_in_full": {"origin": Origin(folder="examples")},
}
#: Other values of settings that are text, and not any text.
TEXTS = {"dram_budget": "2 GiB", "device_budget": "2 GiB", "swap": "64 MiB", "ssd": "elsewhere"}
#: Other settings that a cell needs in order to have this one at all.
NEEDED: dict[str, dict[str, Any]] = {
    "frozen_dtype": {"tuning": "lora", "dtype": "bfloat16"},
    "nodes_per_worker": {"worker": "nodes"},
    "stages_per_node": {"pipeline_schedule": "zb"},
    "nodes_per_stage": {"within_stage": "fcdp"},
    **{name: {"cluster": ClusterSpec(nodes=2, ranks_per_node=2)} for name in ("groups", "cores")},
    "inter_group_bandwidth_bits_per_s": {"cluster": IN_GROUPS},
}
SETTINGS = [pytest.param(item, id=name) for name, item in described(Cell).items() if name != "port"]


def cell(strategy: str = "fcdp", **changes: Any) -> Cell:
    simulated = SimulatedSpec(kind="simulated", nodes=2, ranks_per_node=2, gpu="a40")
    defaults: dict[str, Any] = {"link": 10**8, "cluster": simulated, "reduce_codec": "int8"}
    return made_up.cell(**{"strategy": strategy} | defaults | changes)


def owner(item: Described) -> str:
    """A strategy whose cells have this setting: FCDP, if it has it."""
    name = item.name
    if name in OTHERS or name not in registry.setting_names() or name in CacheSettings.model_fields:
        return "fcdp"
    return next(of.name for of in registry.STRATEGIES if name in of.settings.model_fields)


def usual(item: Described) -> Cell:
    """A cell of a strategy that has this setting."""
    return cell(owner(item), **NEEDED.get(item.name, {}))


def changed(item: Described) -> Cell:
    """A cell that differs from ``usual(item)`` in this setting alone."""
    change = OTHERS.get(item.name) or {item.name: _other(item)}
    change = NEEDED.get(item.name, {}) | change
    if owner(item) != "fcdp":
        return cell(owner(item), **change)
    if item.name in SimulatedSpec.model_fields:
        simulated = cell().cluster
        change = {"cluster": type(simulated)(**{**simulated.model_dump(), **change})}
    return cell(**change)


def _other(item: Described) -> Any:
    value = item.of(usual(item))
    kind = registry.find(owner(item)).settings
    field = Cell.model_fields.get(item.name) or kind.model_fields.get(item.name)
    choices = get_args(field.annotation) if field else ()
    if item.name in TEXTS:
        return TEXTS[item.name]
    if value is None:
        return 2
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    if isinstance(value, float):
        return value / 2 or 0.5
    return next((other for other in choices if other != value), "other")


@pytest.mark.parametrize("item", SETTINGS)
def test_each_setting_comes_back_and_is_part_of_the_id_or_says_that_it_is_not(
    item: Described,
) -> None:
    assert item.of(changed(item)) != item.of(usual(item))
    assert (changed(item).id == usual(item).id) == (item.setting.in_id == "never")
    assert Cell.model_validate_json(changed(item).model_dump_json(indent=2)) == changed(item)


@pytest.mark.parametrize("item", SETTINGS)
def test_each_setting_parts_cells_from_their_baseline_or_says_that_it_does_not(
    item: Described,
) -> None:
    baseline, subject = record(cell("deepspeed-zero3")), record(changed(item))
    table = compare([baseline, subject], baseline.cell.subject)
    rows = table[table["strategy"] == subject.cell.subject]
    alike = rows["baseline"].iloc[0] == baseline.cell.subject
    assert alike == (item.setting.role != "condition")
    shown = [line for line in rendered(summary([baseline, subject]), 400) if "·" in line]
    assert len(shown) == (2 if item.setting.role == "condition" else 1)


@pytest.mark.parametrize("item", SETTINGS)
def test_each_setting_parts_losses_or_says_that_it_does_not(item: Described) -> None:
    reference = record(cell("fsdp2"))
    (_, comparison) = parity.compare([reference, record(changed(item))])
    assert (comparison.difference is None) == item.setting.learns


@pytest.mark.parametrize("item", SETTINGS)
def test_tables_and_figures_say_in_which_setting_cells_differ(item: Described) -> None:
    cells = [usual(item), changed(item)]
    table = compare([record(of) for of in cells])
    shown = run.presentable(table)
    parted = list(matrix.parted(table))
    panels = [title for part, _ in parted for title, _ in panels_of(part)]
    # The model's name stands for all that it is: see its own label.
    values = [item.written(item.of(of)) for of in cells]
    if item.setting.role == "subject":
        names = {of.subject for of in cells}
        assert len(names) == 2
        assert names == set(table["strategy"])
    elif item.setting.role == "condition" and not item.setting.always:
        assert sorted(shown[item.setting.label]) == sorted(values)
        assert item in varying_settings(cells)
        # Several matrices have figures of their own, which name them below.
        prefix = "" if item.name == "matrix" else f"{item.setting.label.lower()} "
        labels = [prefix + value for value in values]
        captions = [f"{words} {provenance(part)}" for part, words in parted]
        by_place = {"model": panels, "run": captions, "training": captions, "axis": labels}
        places = by_place[item.setting.place]
        assert all(any(words in place for place in places) for words in labels)
    if item.setting.role == "condition":
        apart = {"run": (2, 2), "training": (2, 2), "model": (1, 2), "axis": (1, 1)}
        assert (len(parted), len(panels)) == apart[item.setting.place]


class Longer(Cell):
    momentum: Annotated[float, Setting("Momentum", in_id="later")] = 0.0


class Silent(Cell):
    momentum: float = 0.0


def of_type(kind: type[Cell], **more: Any) -> Cell:
    return kind(**{name: getattr(cell(), name) for name in Cell.model_fields}, **more)


def test_a_setting_is_one_line() -> None:
    assert of_type(Longer).id == cell().id
    assert of_type(Longer, momentum=0.5).id != cell().id
    item = described(Longer)["momentum"]
    assert (item.kind, item.written(0.5)) == ("float64", "0.5")


def test_a_field_that_says_nothing_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Silent\.momentum must say once what it is"):
        _ = of_type(Silent).id
    with pytest.raises(TypeError, match=r"Silent\.momentum"):
        described(Silent)
