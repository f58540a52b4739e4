"""Matrix files: what they expand to, and the messages about mistakes in them."""

import itertools
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baselines import pins
from baselines.registry import STRATEGY_NAMES
from experiments.matrix import reader
from experiments.matrix.reader import Matrix
from experiments.records.cell import ClusterSpec
from simulation.quantities import format_link
from simulation.yaml_lines import load
from tests.experiments.stand_in import matrix_file

FILE = """\
name: example
description: for these tests
cluster: {nodes: 2, ranks_per_node: 2}
models:
  - {name: gpt2-a, family: gpt2, layers: 2, width: 16, heads: 2}
  - {name: llama-b, family: llama, layers: 2, width: 16, heads: 2}
axes:
  strategy:
    - deepspeed-zero3
    - fsdp2
    - fcdp
  model: [gpt2-a, llama-b]
  inter_bandwidth: [unshaped, 10 Mbit/s]
  accumulation: [1, 4]
workload:
  tuning: full
  sequence_length: 16
  micro_batch: 1
  dtype: float32
  lora_rank: 4
  learning_rate: 0.001
  warmup_steps: 1
  steps: 5
  timeout_s: 60
skip:
  - when: {accumulation: 4, inter_bandwidth: unshaped}
    reason: not interesting
overrides:
  - when: {inter_bandwidth: 10 Mbit/s, strategy: [fcdp, fsdp2]}
    set: {steps: 2}
"""


LLAMA = "name: llama-b, family: llama, layers: 2, width: 16, heads: 2"
TUNING = "  tuning: full"


def written(directory: Path, text: str = FILE) -> str:
    file = directory / "example.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def read(folder: Path, *changes: tuple[str, str], text: str = FILE, **options: Any) -> Matrix:
    """Read the file with other words in the place of some, which stand in it once."""
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return reader.read(written(folder, text), **options)


def test_axes_are_multiplied_and_strategies_follow_one_another(tmp_path: Path) -> None:
    cells = [entry.cell for entry in read(tmp_path).cells]
    assert len(cells) == 3 * 2 * 2 * 2
    for first in range(0, len(cells), 3):
        group = cells[first : first + 3]
        assert [cell.strategy for cell in group] == ["deepspeed-zero3", "fsdp2", "fcdp"]
        same = {(c.model.name, c.inter_bandwidth_bits_per_s, c.accumulation) for c in group}
        assert len(same) == 1


def test_a_reference_is_one_of_the_strategies(tmp_path: Path) -> None:
    assert read(tmp_path).reference is None
    assert reader.read(written(tmp_path, FILE + "reference: fsdp2\n")).reference == "fsdp2"


def test_skip_rules_and_overrides_apply_to_their_cells_only(tmp_path: Path) -> None:
    for entry in read(tmp_path).cells:
        cell = entry.cell
        unshaped = cell.inter_bandwidth_bits_per_s is None
        skipped = cell.accumulation == 4 and unshaped
        assert entry.skip_reason == ("not interesting" if skipped else None)
        assert cell.steps == (2 if not unshaped and cell.strategy != "deepspeed-zero3" else 5)


def test_a_pin_that_is_not_installed_is_listed_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "version", {"current": "0.19.6", "paper": None}.get)
    entries = read(tmp_path, (TUNING, f"{TUNING}\n  deepspeed: paper")).cells
    listed = {p.cell.strategy: p for p in entries if p.cell.accumulation == 1}
    zero3 = listed["deepspeed-zero3"]
    assert zero3.skip_reason == "DeepSpeed (paper) is not installed: make baselines"
    assert zero3.cell.variant == "deepspeed-zero3@paper"
    assert listed["fcdp"].skip_reason is None


def test_a_setting_multiplies_the_cells_of_strategies_that_have_it_alone(tmp_path: Path) -> None:
    axis = ("axes:\n", "axes:\n  policy: [host, disk]\n  deepspeed: [current, paper]\n")
    cells = [p.cell for p in read(tmp_path, axis).cells]
    of = Counter(cell.strategy for cell in cells)
    once = Counter(p.cell.strategy for p in read(tmp_path).cells)
    assert (of["fsdp2"], of["fcdp"]) == (once["fsdp2"], 2 * once["fcdp"])
    assert of["deepspeed-zero3"] == 2 * once["deepspeed-zero3"]
    assert len({cell.id for cell in cells}) == len(cells)


def test_a_cell_that_one_combination_runs_is_not_skipped_for_another(tmp_path: Path) -> None:
    axis = ("axes:\n", "axes:\n  policy: [host, disk]\n")
    rule = ("skip:\n", "skip:\n  - when: {policy: host}\n    reason: known\n")
    expanded = read(tmp_path, axis, rule)
    skipped = {p.cell.strategy for p in expanded.cells if p.skip_reason == "known"}
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
    fcdp = [p.cell.choices for p in expanded.cells if p.cell.strategy == "fcdp"]
    assert set(fcdp) == {("flat exchanges",), (), ("gather delta",)}


def test_another_cluster_takes_the_place_of_the_files(tmp_path: Path) -> None:
    rented = ClusterSpec(kind="rented", nodes=4, ranks_per_node=8)
    default, expanded = reader.read(written(tmp_path)), reader.read(written(tmp_path), rented)
    assert expanded.cluster == rented
    assert {entry.cell.cluster for entry in expanded.cells} == {rented}
    ported = FILE.replace("nodes: 2", "port: 29600, nodes: 2", 1)
    assert reader.read(written(tmp_path, ported), rented).cluster.port == 29600
    assert not {p.cell.id for p in default.cells} & {p.cell.id for p in expanded.cells}
    reasons = {p.cell.inter_bandwidth_bits_per_s: p.skip_reason for p in expanded.cells}
    assert "nothing limits them to a bandwidth" in str(reasons[10_000_000])


def test_what_needs_machines_beside_the_nodes_is_skipped_where_there_are_none() -> None:
    pipeline = reader.read("luwu/pipeline", ClusterSpec(kind="rented", nodes=1, ranks_per_node=1))
    for entry in pipeline.cells:
        assert "needs machines for its switch and server" in str(entry.skip_reason)


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
    cells = [entry.cell for entry in reader.read(file).cells]
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
    assert {entry.cell.id for entry in again.cells} == {cell.id for cell in cells}


def test_ids_are_those_of_other_machines_and_days_and_of_what_changes_the_measurement() -> None:
    first = reader.read("quickstart").cells[0].cell
    fixed = first.model_copy(update={"steps": 3, "warmup_steps": 1, "matrix": "quickstart"})
    assert fixed.id == "deepspeed-zero3-full-gpt2-4x128-100mbit-k1-4e3e544b"
    cluster = first.cluster.model_copy(update={"port": 29999})
    assert first.model_copy(update={"timeout_s": 1.0, "cluster": cluster}).id == first.id
    assert first.model_copy(update={"seed": 7}).id != first.id


def test_repetitions_come_in_both_orders_and_simulations_are_not_repeated(tmp_path: Path) -> None:
    once = [entry.cell for entry in reader.read(str(matrix_file(tmp_path))).cells]
    file = str(matrix_file(tmp_path, extra="\n        repeats: 3\n"))
    cells = [entry.cell for entry in reader.read(file).cells]
    assert [cell.repeat for cell in cells] == [0] * 6 + [1] * 6 + [2] * 6
    in_turn = [cell.model_copy(update={"repeat": 0}) for cell in cells]
    assert in_turn == [*once, *reversed(once), *once]
    assert len({cell.id for cell in cells}) == 18
    assert len(reader.read(file, simulated=True).cells) == 6


#: Lines added to the workload, and the messages about them.
ADDED = [
    ("data: {text: none.txt}", "data.text: there is no file or folder none.txt beside this matrix"),
    ("data: {jsonl: a.jsonl}", "data.jsonl: there is no file or folder a.jsonl beside"),
    ("data: prose.txt", "data: 'prose.txt' is not a mapping such as {text: FILE}"),
    ("data: {field: text}", "data: says none of library, text, jsonl, dataset"),
    ("data: {library: perl}", "data.library: 'perl' is not allowed"),
    ("data: {library: python, tokenizer: ./t}", "data.tokenizer: there is no file or folder ./t "),
    ("loss: mse", "loss: 'mse' is no loss; allowed: 'cross entropy', a function as package.mod"),
    ("loss: nowhere:mse", "loss: no module 'nowhere' in the current directory or among installed"),
    ("policy: nowhere:Mine", "policy: policy = 'nowhere:Mine': cannot be imported: No module nam"),
    ("policy: os:system(true)", "policy: policy = 'os:system(true)': is no class with a method"),
    ("objective: grpo", "objective: 'grpo' is not a mapping such as {kind: dpo}"),
    ("objective: {kind: gpro}",
     "objective.kind: unknown objective 'gpro'; did you mean 'grpo'? allowed: causal-lm, dpo, "),
    ("objective: {kind: grpo, new_tokens: 4, group: 1}",
     "objective.group: 1 is not allowed: input should be greater than or equal to 2"),
    ("objective: {kind: grpo, new_tokens: 99, group: 2}",
     "objective: 99 new tokens leave no prompt in sequences of 16; allowed are up to 16"),
    ("objective: {kind: distillation, teacher: b}", "objective.teacher: unknown model 'b'"),
    ("objective: {kind: distillation}", "objective: teacher is missing"),
    ("objective: {function: nowhere:mine}", "objective.function: no module 'nowhere' in the curr"),
    ("held_out: -1", "held_out: -1 is not allowed: input should be greater than or equal to 0"),
    ("origin: x", "origin: unknown key 'origin'; allowed: "),
]  # fmt: skip
MISTAKES = [
    ("- fcdp\n", "- ddp\n  policy: [disk]\n", 12, "axes.policy: no strategy of this matrix has it; "
     "those that do: fcdp-paper, fcdp-sched, fcdp"),
    ("    - fcdp\n", "    - fcdpp\n", 11, "axes.strategy[2]: unknown strategy 'fcdpp'; did you "
     "mean 'fcdp'? allowed: deepspeed-zero3, "),
    ("[gpt2-a, llama-b]", "[gpt2-a, lama-b]", 12, "axes.model[1]: unknown model 'lama-b'; "
     "did you mean 'llama-b'? allowed: gpt2-a, llama-b"),
    ("10 Mbit/s]\n  acc", "0 Mbit/s]\n  acc", 13, "axes.inter_bandwidth[1]: '0 Mbit/s' is not a "
     "bandwidth; allowed: a number above 0 and a unit, such as '10 Mbit/s', or 'unshaped'"),
    ("10 Mbit/s]\n  acc", "10 MiB/s]\n  acc", 13, "axes.inter_bandwidth[1]: '10 MiB/s' is not a "
     "bandwidth; allowed: a number above 0 and a unit, such as '10 Mbit/s', or 'unshaped'"),
    ("accumulation: [1, 4]", "accumulation: []", 14, "axes.accumulation: [] is not allowed: "
     "list should have at least 1 item"),
    ("accumulation: [1, 4]", "accumulation: [1, 1]", 14, "axes.accumulation[1]: 1 is already in "
     "this list"),
    ("accumulation: [1, 4]", "accumulation: [1, 4, 2.5]", 14, "axes.accumulation[2]: 2.5 is not "
     "allowed: input should be a valid integer"),
    ("accumulation: [1, 4]", "accumulation: [1, true]", 14, "axes.accumulation[1]: True is "),
    ("accumulation: [1, 4]", "acumulation: [1, 4]", 14, "axes.acumulation: unknown key "
     "'acumulation'; did you mean 'accumulation'? allowed: "),
    ("  steps: 5", "  steps: 0", 23, "workload.steps: 0 is not allowed: input should be greater "
     "than or equal to 1"),
    ("  steps: 5", "  steps: five", 23, "workload.steps: 'five' is not allowed: input should be "
     "a valid integer"),
    ("  steps: 5", "  steps: 5\n  steps: 6", 24, "workload.steps: this key is already on line "
     "23; keep one"),
    ("learning_rate: 0.001", "learning_rate: 1e-3", 21, "workload.learning_rate: '1e-3' is not "
     "allowed: input should be a valid number; YAML reads this as text, write 1.0e-3"),
    ("  steps: 5\n", "", 1, "steps is missing; give it in workload or in axes"),
    ("  tuning: full", "  tuning: full\n  strategy: fcdp", 17, "workload.strategy: is an axis "
     "already; keep one of the two"),
    ("  tuning: full", "  tuning: full\n  gather_codec: int2", 17, "workload.gather_codec: codec = "
     "'int2': allowed are none, int8, int4, int8(128) for a block"),
    ("    - fcdp\n", "    - fcdp\n    - zeropp\n  gather_codec: [none, int8]\n", 13,
     "axes.gather_codec[1]: 'int8' is not allowed: allowed is none: the strategy has its own"),
    ("  tuning: full", "  tuning: full\n  error_feedback: true", 17, "workload.error_feedback: "
     "True is not allowed: needs a reduce_codec that rounds, whose loss it feeds back"),
    ("  tuning: full", "  tuning: half", 16, "workload.tuning: 'half' is not allowed: input "
     "should be 'full' or 'lora'"),
    ("width: 16, heads: 2}\naxes", "width: 16, heads: 3}\naxes", 6, "models[1]: "),
    ("width: 16, heads: 2}\naxes", "width: 16}\naxes", 6, "models[1]: heads is missing"),
    ("width: 16, heads: 2}\naxes", "width: wide, heads: 2}\naxes", 6, "models[1].width: 'wide' "
     "is not allowed: input should be a valid integer"),
    ("family: llama", "family: [gpt2]", 6, "models[1].family: unknown family ['gpt2']; did you "
     "mean 'gpt2'? allowed: gpt2, llama, convolutional, resnet"),
    ("name: llama-b", "name: gpt2-a", 6, "models[1].name: 'gpt2-a' is the name of an earlier"),
    ("name: llama-b", "name: llama/b", 6, "models[1].name: 'llama/b' is not allowed"),
    (LLAMA, "name: b, config: ./b", 6, "models[1].config: there is no file or folder ./b beside "
     "this matrix file"),
    (LLAMA, "name: b, config: 4", 6, "models[1].config: 4 is not text"),
    (LLAMA, "name: b, function: nowhere.models:build", 6, "models[1].function: no module "
     "'nowhere.models' in the current directory or among installed packages: "),
    (LLAMA, "name: b, function: tests.nowhere:build", 6, "models[1].function: no module "
     "'tests.nowhere' in the current directory or among installed packages: there is no such file"),
    (LLAMA, "name: b, function: tests.experiments", 6, "models[1].function: 'tests.experiments' is "
     "not allowed: must be of the form \"package.module:function\""),
    (LLAMA, "name: b, function: 'a:b', layers: 2", 6, "models[1].layers: unknown key 'layers'; "
     "allowed: name, function"),
    ("nodes: 2", "kind: cloud, nodes: 2", 3, "cluster.kind: unknown kind 'cloud'; allowed: "
     "emulated, rented, simulated"),
    ("[unshaped, 10 Mbit/s]", "[1 bit/s, 10 Mbit/s]", 13, "axes."
     "inter_bandwidth[0]: 1 bit/s cannot be emulated; allowed are 10 kbit/s to "),
    ("nodes: 2", "nodes: 0", 3, "cluster.nodes: 0 is not allowed: input should be greater"),
    ("nodes: 2", "nodes: 4, groups: 3", 3, "cluster.groups: 3 is not allowed: must "
     "divide the cluster's 4 nodes; allowed are 1, 2, 4"),
    ("nodes: 2", "kind: rented, nodes: 2, groups: 2", 3, "cluster.groups: 2 is not allowed: "
     "allowed is 1 on clusters of kind rented, whose links are as they are"),
    ("nodes: 2", "kind: rented, cores: own, nodes: 2", 3, "cluster.cores: 'own' is not allowed: "
     "allowed is shared on clusters of kind rented, whose nodes are apart"),
    ("  tuning: full", "  tuning: full\n  inter_group_bandwidth: 1 Mbit/s", 17, "workload."
     "inter_group_bandwidth: 1000000 is not allowed: needs a cluster of several "
     "groups of nodes (groups)"),
    ("- fcdp\n", "- fcdp\n    - co2\n  worker: [nodes]\n  nodes_per_worker: [4]\n", 14, "axes."
     "nodes_per_worker[0]: 4 is not allowed: must divide the cluster's 2 nodes; "
     "allowed are 1, 2"),
    ("- fcdp\n", "- fcdp\n    - co2\n  interval: [12, 0]\n", 13, "axes.interval[1]: 0 is not "
     "allowed: input should be greater than or equal to 1"),
    ("- fcdp\n", "- fcdp\n    - co2\n  clip: [0.0]\n", 13, "axes.clip[0]: 0.0 is not allowed: "
     "input should be greater than 0"),
    ("nodes: 2", "node: 2", 3, "cluster.node: unknown key 'node'; did you mean 'nodes'? "
     "allowed: nodes, "),
    ("accumulation: 4, inter", "accumulation: 3, inter", 26, "skip[0].when.accumulation: 3 is "
     "not a value of accumulation in this matrix"),
    ("    reason: not interesting\n", "    reason:\n", 27, "skip[0].reason: None is not "
     "allowed: input should be a valid string"),
    ("[fcdp, fsdp2]", "[fcdp, zero]", 29, "overrides[0].when.strategy[1]: unknown strategy "),
    ("{steps: 2}", "{accumulation: 2}", 30, "overrides[0].set.accumulation: unknown key "),
    ("name: example", "nam: example", 1, "nam: unknown key 'nam'; did you mean 'name'? allowed: "
     "name, description, cluster, models, axes, reference, repeats, workload, skip, overrides"),
    ("axes:\n", "reference: ddp\naxes:\n", 7, "reference: not in this matrix: 'ddp'; allowed: "
     "deepspeed-zero3, fsdp2, fcdp"),
    ("axes:\n", "repeats: twice\naxes:\n", 7, "repeats: 'twice' is not allowed: input should be "
     "a valid integer"),
    ("axes:\n", "repeats: 1000000000\naxes:\n", 7, "repeats: 1000000000 is not allowed: input "
     "should be less than or equal to 1000"),
    ("name: example", "name: an example", 1, "name: 'an example' is not allowed: "),
    ("axes:\n", "axes: [\n", 9, "not valid YAML: "),
    ("  tuning: full", "  tuning: !!python/name:os.system", 16, "not valid YAML: could not "),
    ("name: example", "name: &loop [*loop]", 1, "name[0]: the alias contains itself"),
    ("name: example", "name: " + 21 * "[" + 21 * "]", 1, "nested too deeply; allowed are 20 lev"),
    ("name: example", "a: &a [" + 999 * "1, " + "1]\nb: &b [" + 101 * "*a, " + "]", 1, "b[98][898]"
     ": aliases repeat too much; allowed are 100,000 values"),
    ("name: example", "name: 2026-13-45", 1, "name: '2026-13-45' cannot be read: "),
    ("name: example", "name: \x07", 1, "not valid YAML: "),
    *(("workload:", f"workload:\n  {line}", 16, f"workload.{message}") for line, message in ADDED),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "line", "problem"), MISTAKES)
def test_mistakes_name_file_line_and_key(
    tmp_path: Path, old: str, new: str, line: int, problem: str
) -> None:
    assert FILE.count(old) >= 1
    with pytest.raises(ValueError, match="example") as raised:
        reader.read(written(tmp_path, FILE.replace(old, new, 1)))
    assert str(raised.value).startswith(f"example.yaml:{line}: {problem}")


@pytest.mark.parametrize(("content", "line"), [(b"", 1), (b"name: a\nb: \xff\n", 2), (b"- 1", 1)])
def test_files_that_are_no_matrix_at_all(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "example.yaml"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^example.yaml:{line}: "):
        reader.read(str(file))


def test_values_and_merge_keys_are_those_of_safe_load(tmp_path: Path) -> None:
    text = textwrap.dedent(
        """\
        base: &base {a: 1, b: [yes, 2.5, null, 0x10]}
        one: {<<: *base, b: 2}
        two: {<<: *base}
        three: *base
        when: 2026-01-02
        """
    )
    document = load(Path(written(tmp_path, text)))
    assert document.values == yaml.safe_load(text)
    assert document.lines[("base", "b", 1)] == 1
    assert document.lines[("two",)] == 3
