"""Models, data and losses in matrix files that are not built in."""

import json
from pathlib import Path

import pytest

from experiments.matrix import reader
from experiments.records.workload import ConfiguredModel, JsonLines, Library, Origin, TextFile
from tests.experiments import families
from tests.experiments.matrix.files import FILE, LLAMA, TUNING, read, written


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a matrix file, with what it names beside it."""
    (tmp_path / "qwen").mkdir()
    config = {**families.configuration("qwen2"), "transformers_version": "5.0.0"}
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "prose.txt").write_text("In the beginning was the word.", encoding="utf-8")
    (tmp_path / "chat.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n', encoding="utf-8")
    return tmp_path


def test_a_configuration_travels_with_its_cells(folder: Path) -> None:
    for config in ("qwen", "qwen/config.json"):
        matrix = read(folder, (LLAMA, f"name: llama-b, config: {config}"))
        (cell, *_) = (cell for cell in matrix.cells if cell.model.name == "llama-b")
        assert cell.model == ConfiguredModel(
            name="llama-b", config=f"./{config}", configuration=families.configuration("qwen2")
        )
        assert type(cell).model_validate_json(cell.model_dump_json()) == cell
        assert cell.origin.key("model", "config") == "example.yaml:6: models[1].config"
        assert cell.origin.path("qwen") == folder / "qwen"


def test_data_are_known_by_their_content(folder: Path) -> None:
    file, new = folder / "prose.txt", TUNING + "\n  data: {text: prose.txt}"
    first = read(folder, (TUNING, new)).cells[0]
    assert first.data.name == "prose.txt"
    assert first.origin.key("data") == "example.yaml:17: workload.data"
    (moved := folder / "elsewhere").mkdir()
    (moved / "prose.txt").write_bytes(file.read_bytes())
    assert read(moved, (TUNING, new)).cells[0].id == first.id
    file.write_text("Another text.", encoding="utf-8")
    assert read(folder, (TUNING, new)).cells[0].id != first.id


def test_data_may_be_an_axis_and_part_of_a_rule(folder: Path) -> None:
    new = """  data:
    - {library: python}
    - {text: prose.txt}
    - {jsonl: chat.jsonl, tokenizer: qwen}
workload:
"""
    text = FILE.replace("workload:\n", new).replace(
        "{accumulation: 4, inter_bandwidth: unshaped}", "{data: {text: prose.txt}}"
    )
    matrix = reader.read(written(folder, text))
    assert {type(cell.data) for cell in matrix.cells} == {Library, TextFile, JsonLines}
    reasons = {cell.data.name: matrix.skipped.get(cell.id) for cell in matrix.cells}
    assert reasons.pop("prose.txt") == "not interesting"
    assert reasons == {"standard library": None, "chat.jsonl by ./qwen": None}


def test_explicit_defaults_are_the_defaults(tmp_path: Path) -> None:
    explicit = TUNING + "\n  data: {library: python}\n  loss: cross entropy\n  held_out: 0"
    explicit += "\n  optimizer: {kind: adamw}"
    silent = [cell.id for cell in reader.read(written(tmp_path)).cells]
    assert [cell.id for cell in read(tmp_path, (TUNING, explicit)).cells] == silent
    # Built-in workloads have no origin.
    assert {cell.origin.folder for cell in reader.read(written(tmp_path)).cells} == {""}
    assert reader.read("quickstart").cells[0].origin == Origin()


def test_a_data_set_needs_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.matrix import workloads

    monkeypatch.setattr(workloads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="17: workload.data.dataset: needs the package datasets"):
        read(folder, (TUNING, TUNING + "\n  data: {dataset: squad}"))
