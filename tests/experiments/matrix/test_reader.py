"""Matrix files and what they expand to; ``test_refusals`` has the mistakes in them."""

import itertools
import json
from pathlib import Path

import pytest
import yaml

from baselines import pins
from experiments.matrix import reader
from experiments.records.cell import ClusterSpec
from tests.experiments.matrix.files import FILE, TUNING, read, written
from tests.experiments.stand_in import matrix_file


def test_axes_are_multiplied_and_strategies_follow_one_another(tmp_path: Path) -> None:
    cells = read(tmp_path).cells
    assert len(cells) == 3 * 2 * 2 * 2
    for first in range(0, len(cells), 3):
        group = cells[first : first + 3]
        assert [cell.strategy for cell in group] == ["deepspeed-zero3", "fsdp2", "fcdp"]
        same = {(c.model.name, c.inter_bandwidth_bits_per_s, c.accumulation) for c in group}
        assert len(same) == 1
    ids = {cell.id for cell in cells}
    assert len(ids) == len(cells)
    # Another order of the axes: the same cells, and the same ids.
    document = yaml.safe_load(FILE)
    document["axes"] = dict(reversed(document["axes"].items()))
    again = reader.read(written(tmp_path, yaml.safe_dump(document, sort_keys=False)))
    assert {cell.id for cell in again.cells} == ids


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
