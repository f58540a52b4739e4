"""Matrix files and what they expand to; ``test_refusals`` has the mistakes in them."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from baselines import pins, registry
from baselines.registry import STRATEGY_NAMES
from experiments.matrix import reader
from experiments.records.cell import Cell, ClusterSpec
from experiments.records.record import read as read_records
from simulation import files
from simulation.quantities import format_link
from tests.experiments.matrix.files import FILE, TUNING, read, written
from tests.experiments.stand_in import matrix_file, record


def test_axes_are_multiplied_and_strategies_follow_one_another(tmp_path: Path) -> None:
    cells = read(tmp_path).cells
    assert len(cells) == 3 * 2 * 2 * 2
    for first in range(0, len(cells), 3):
        group = cells[first : first + 3]
        assert [cell.strategy for cell in group] == ["deepspeed-zero3", "fsdp2", "fcdp"]
        same = {(c.model.name, c.inter_bandwidth_bits_per_s, c.accumulation) for c in group}
        assert len(same) == 1


def test_what_is_named_first_runs_first_in_the_order_of_the_rules(tmp_path: Path) -> None:
    rules = [{"accumulation": 4, "strategy": ["fcdp", "fsdp2"]}, {"strategy": "fcdp"}]
    named = "".join(f"  - when: {json.dumps(when)}\n" for when in rules)
    usual, cells = (
        read(tmp_path).cells,
        read(tmp_path, ("skip:\n", f"first:\n{named}skip:\n")).cells,
    )
    in_turn = [
        [cell for cell in usual if cell.accumulation == 4 and cell.strategy in ("fsdp2", "fcdp")],
        [cell for cell in usual if cell.accumulation == 1 and cell.strategy == "fcdp"],
    ]
    others = [cell for cell in usual if not any(cell in turn for turn in in_turn)]
    assert [cell.id for cell in cells] == [cell.id for cell in itertools.chain(*in_turn, others)]


def test_skip_rules_and_overrides_apply_to_their_cells_only(tmp_path: Path) -> None:
    matrix = read(tmp_path)
    for cell in matrix.cells:
        unshaped = cell.inter_bandwidth_bits_per_s is None
        skipped = cell.accumulation == 4 and unshaped
        assert matrix.skipped.get(cell.id) == ("not interesting" if skipped else None)
        assert cell.steps == (2 if not unshaped and cell.strategy != "deepspeed-zero3" else 5)


def test_a_pin_that_is_not_installed_is_listed_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "version", {"current": "0.19.6", "paper": None}.get)
    matrix = read(tmp_path, (TUNING, f"{TUNING}\n  deepspeed: paper"))
    listed = {cell.strategy: cell for cell in matrix.cells if cell.accumulation == 1}
    zero3 = listed["deepspeed-zero3"]
    assert matrix.skipped[zero3.id] == "DeepSpeed (paper) is not installed: make baselines"
    assert zero3.variant == "deepspeed-zero3@paper"
    assert listed["fcdp"] in matrix.running


def test_a_setting_multiplies_the_cells_of_strategies_that_have_it_alone(tmp_path: Path) -> None:
    axis = ("axes:\n", "axes:\n  policy: [host, disk]\n  deepspeed: [current, paper]\n")
    cells = read(tmp_path, axis).cells
    of = Counter(cell.strategy for cell in cells)
    once = Counter(cell.strategy for cell in read(tmp_path).cells)
    assert (of["fsdp2"], of["fcdp"]) == (once["fsdp2"], 2 * once["fcdp"])
    assert of["deepspeed-zero3"] == 2 * once["deepspeed-zero3"]
    assert len({cell.id for cell in cells}) == len(cells)


def test_a_cell_that_one_combination_runs_is_not_skipped_for_another(tmp_path: Path) -> None:
    axis = ("axes:\n", "axes:\n  policy: [host, disk]\n")
    rule = ("skip:\n", "skip:\n  - when: {policy: host}\n    reason: known\n")
    expanded = read(tmp_path, axis, rule)
    reasons = expanded.skipped
    skipped = {cell.strategy for cell in expanded.cells if reasons.get(cell.id) == "known"}
    assert skipped == {"fcdp"}


def test_a_combination_that_no_cell_can_have_is_left_out_where_a_rule_skips_it(
    tmp_path: Path,
) -> None:
    """Flat exchanges carry whole values alone."""
    axis = ("axes:\n", "axes:\n  exchanges: [flat, hierarchical]\n  gather_codec: [none, delta]\n")
    rule = "skip:\n  - when: {exchanges: flat, gather_codec: delta}\n    reason: whole values\n"
    with pytest.raises(ValueError, match="allowed with another gather_codec than none"):
        read(tmp_path, axis)
    expanded = read(tmp_path, axis, ("skip:\n", rule))
    fcdp = [cell.choices for cell in expanded.cells if cell.strategy == "fcdp"]
    assert set(fcdp) == {("flat exchanges",), (), ("gather delta",)}


def test_another_cluster_takes_the_place_of_the_files(tmp_path: Path) -> None:
    rented = ClusterSpec(kind="rented", nodes=4, ranks_per_node=8)
    default, expanded = reader.read(written(tmp_path)), reader.read(written(tmp_path), rented)
    assert expanded.cluster == rented
    assert {cell.cluster for cell in expanded.cells} == {rented}
    ported = FILE.replace("nodes: 2", "port: 29600, nodes: 2", 1)
    assert reader.read(written(tmp_path, ported), rented).cluster.port == 29600
    assert not {cell.id for cell in default.cells} & {cell.id for cell in expanded.cells}


axis_values: dict[str, st.SearchStrategy[Any]] = {
    "strategy": st.sampled_from(STRATEGY_NAMES),
    "model": st.sampled_from(["gpt2-a", "llama-b"]),
    "tuning": st.sampled_from(["full", "lora"]),
    "inter_bandwidth": st.sampled_from(["unshaped", "10 Mbit/s", "1 Gbit/s", "25 kbit/s"]),
    "micro_batch": st.integers(1, 10**6),
    "steps": st.integers(1, 1000),
    "learning_rate": st.floats(1e-6, 1.0),
    "seed": st.integers(0, 2**31),
}


@st.composite
def axes(draw: st.DrawFn) -> dict[str, list[Any]]:
    names = draw(st.permutations(sorted(axis_values)))
    chosen = names[: draw(st.integers(1, 5))]
    return {
        name: draw(st.lists(axis_values[name], min_size=1, max_size=3, unique=True))
        for name in chosen
    }


@given(axes())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_cell_twice_and_none_lost(tmp_path: Path, chosen: dict[str, list[Any]]) -> None:
    document = yaml.safe_load(FILE)
    constants = document["workload"] | {
        "strategy": "fcdp",
        "model": "gpt2-a",
        "inter_bandwidth": "unshaped",
        "accumulation": 1,
    }
    document["axes"] = chosen
    document["workload"] = {k: v for k, v in constants.items() if k not in chosen} or None
    for rules in ("skip", "overrides"):
        del document[rules]
    file = written(tmp_path, yaml.safe_dump(document, sort_keys=False))
    cells = reader.read(file).cells
    assert len({cell.id for cell in cells}) == len(cells)
    points = [
        tuple(
            cell.model.name
            if name == "model"
            else format_link(cell.inter_bandwidth_bits_per_s)
            if name == "inter_bandwidth"
            else getattr(cell, name)
            for name in chosen
        )
        for cell in cells
    ]
    assert sorted(map(repr, points)) == sorted(map(repr, itertools.product(*chosen.values())))

    # Another order of the axes: the same cells, and the same ids.
    document["axes"] = dict(reversed(chosen.items()))
    again = reader.read(written(tmp_path, yaml.safe_dump(document, sort_keys=False)))
    assert {cell.id for cell in again.cells} == {cell.id for cell in cells}


#: Some values of settings of strategies; those of one strategy may not go together.
OF_STRATEGIES: dict[str, list[Any]] = {
    "policy": ["none", "host", "disk", "threshold(0.8)"],
    "gather_codec": ["none", "int8(128)", "delta"],
    "reduce_codec": ["none", "int4", "exact"],
    "error_feedback": [False, True],
    "exchanges": ["hierarchical", "undeferred", "flat"],
    "partial_gradients": ["auto", "device", "host", "each"],
    "forwards": ["gathered", "unsharded"],
    "pipeline_schedule": ["1f1b", "looped", "zb"],
    "stages_per_node": [1, 2],
    "within_stage": ["sharded", "fcdp"],
    "nodes_per_stage": [1, 2],
    "deepspeed": ["current", "paper"],
    "interval": [2, 12],
    "worker": ["rank", "nodes"],
    "nodes_per_worker": [1, 2],
    "clip": [None, 0.5],
    "overlap": [1, 3],
    "stages": [None, 2],
    "chunk_bytes": [4096, 8192],
    "ssd_limit": [None, 10**8],
}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of one cell as a matrix file has them, and of these what its strategy has."""
    settings = {name: draw(values) for name, values in axis_values.items()}
    kind = registry.find(settings["strategy"]).settings
    names = [name for name in OF_STRATEGIES if name in kind.model_fields and draw(st.booleans())]
    own = {name: draw(st.sampled_from(OF_STRATEGIES[name])) for name in names}
    return settings | {"accumulation": draw(st.integers(1, 8))} | own, own


@given(workloads())
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_a_cell_is_as_the_file_says_and_comes_back_from_json_and_from_its_record(
    tmp_path: Path, chosen: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    given_values, own = chosen
    document = yaml.safe_load(FILE)
    document["axes"] = {"strategy": [given_values.pop("strategy")]}
    document["workload"] |= given_values
    for rules in ("skip", "overrides"):
        del document[rules]
    file = written(tmp_path, yaml.safe_dump(document))
    try:
        (cell,) = reader.read(file).cells
    except ValueError:  # values that do not go together
        reject()
    assert dict(cell.settings) == dict(type(cell.settings)()) | own
    assert format_link(cell.inter_bandwidth_bits_per_s) == given_values["inter_bandwidth"]
    same = ("tuning", "micro_batch", "steps", "learning_rate", "seed", "accumulation")
    assert {name: getattr(cell, name) for name in same} == {
        name: given_values[name] for name in same
    }
    again = Cell.model_validate_json(cell.model_dump_json(indent=2))
    assert (again, again.id) == (cell, cell.id)
    (tmp_path / "records.jsonl").unlink(missing_ok=True)
    files.append(record(cell), tmp_path / "records.jsonl")
    assert read_records(tmp_path / "records.jsonl") == [record(cell)]


def test_ids_are_those_of_other_machines_and_days_and_of_what_changes_the_measurement() -> None:
    first = reader.read("quickstart").cells[0]
    fixed = first.model_copy(update={"steps": 3, "warmup_steps": 1, "matrix": "quickstart"})
    assert fixed.id == "deepspeed-zero3-full-gpt2-4x128-100mbit-k1-4e3e544b"
    cluster = first.cluster.model_copy(update={"port": 29999})
    assert first.model_copy(update={"timeout_s": 1.0, "cluster": cluster}).id == first.id
    assert first.model_copy(update={"seed": 7}).id != first.id


def test_repetitions_come_in_both_orders_and_simulations_are_not_repeated(tmp_path: Path) -> None:
    once = reader.read(str(matrix_file(tmp_path))).cells
    file = str(matrix_file(tmp_path, extra="\n        repeats: 3\n"))
    cells = reader.read(file).cells
    assert [cell.repeat for cell in cells] == [0] * 6 + [1] * 6 + [2] * 6
    in_turn = [cell.model_copy(update={"repeat": 0}) for cell in cells]
    assert in_turn == [*once, *reversed(once), *once]
    assert len({cell.id for cell in cells}) == 18
    assert len(reader.read(file, simulated=True).cells) == 6


@pytest.mark.parametrize(("content", "line"), [(b"", 1), (b"name: a\nb: \xff\n", 2), (b"- 1", 1)])
def test_files_that_are_no_matrix_at_all(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "example.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^example.yaml:{line}: "):
        reader.read(str(file))
