"""Models, data and losses in matrix files that are not built in."""

import json
from pathlib import Path

import pytest

from experiments.matrix import reader
from experiments.records.workload import ConfiguredModel, JsonLines, Library, Origin, TextFile
from tests.experiments import families
from tests.experiments.matrix.test_reader import FILE, LLAMA, TUNING, read, written


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
        (cell, *_) = (p.cell for p in matrix.cells if p.cell.model.name == "llama-b")
        assert cell.model == ConfiguredModel(
            name="llama-b", config=f"./{config}", configuration=families.configuration("qwen2")
        )
        assert type(cell).model_validate_json(cell.model_dump_json()) == cell
        assert cell.origin.key("model", "config") == "example.yaml:6: models[1].config"
        assert cell.origin.path("qwen") == folder / "qwen"


def test_data_are_known_by_their_content(folder: Path) -> None:
    file, new = folder / "prose.txt", TUNING + "\n  data: {text: prose.txt}"
    first = read(folder, (TUNING, new)).cells[0].cell
    assert first.data.name == "prose.txt"
    assert first.origin.key("data") == "example.yaml:17: workload.data"
    (moved := folder / "elsewhere").mkdir()
    (moved / "prose.txt").write_bytes(file.read_bytes())
    assert read(moved, (TUNING, new)).cells[0].cell.id == first.id
    file.write_text("Another text.", encoding="utf-8")
    assert read(folder, (TUNING, new)).cells[0].cell.id != first.id


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
    cells = reader.read(written(folder, text)).cells
    assert {type(entry.cell.data) for entry in cells} == {Library, TextFile, JsonLines}
    reasons = {p.cell.data.name: p.skip_reason for p in cells}
    assert reasons.pop("prose.txt") == "not interesting"
    assert reasons == {"standard library": None, "chat.jsonl by ./qwen": None}


def test_explicit_defaults_are_the_defaults(tmp_path: Path) -> None:
    explicit = TUNING + "\n  data: {library: python}\n  loss: cross entropy\n  held_out: 0"
    silent = [entry.cell.id for entry in reader.read(written(tmp_path)).cells]
    assert [entry.cell.id for entry in read(tmp_path, (TUNING, explicit)).cells] == silent
    # Built-in workloads have no origin.
    assert {entry.cell.origin.folder for entry in reader.read(written(tmp_path)).cells} == {""}
    assert reader.read("quickstart").cells[0].cell.origin == Origin()


def test_only_what_the_simulator_knows_is_simulated(folder: Path) -> None:
    llama = folder / "llama.json"
    llama.write_text(json.dumps(families.configuration("llama")), encoding="utf-8")

    def reasons(model: str) -> set[str | None]:
        matrix = read(folder, (LLAMA, f"name: llama-b, {model}"), simulated=True)
        return {
            p.skip_reason
            for p in matrix.cells
            if p.cell.model.name == "llama-b" and p.skip_reason != "not interesting"
        }

    assert reasons("config: llama.json") == {None}
    assert reasons("config: qwen") == {None}
    unknown = reasons("function: 'tests.experiments.own_model:build'")
    assert unknown == {
        "is not simulated: the shape of what tests.experiments.own_model:build makes is not known"
    }


@pytest.mark.parametrize(
    ("model", "key", "problem"),
    [
        ("config: prose.txt", "config", "is not JSON"),
        ("config: list.json", "config", "holds no configuration"),
        ("config: untyped.json", "config", "untyped.json says no model_type"),
        ("config: qwen, weights: pretrained", "weights", "there are no *.safetensors in qwen"),
        ("config: qwen, weights: best", "weights", "'best' is not allowed"),
        ("config: qwen, configuration: {}", "configuration", "unknown key 'configuration'"),
    ],
)
def test_mistakes_in_models_name_line_and_key(
    folder: Path, model: str, key: str, problem: str
) -> None:
    files = {"list.json": "[]", "untyped.json": "{}", "qwen/pytorch_model.bin": "pickled"}
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="example") as raised:
        read(folder, (LLAMA, f"name: llama-b, {model}"))
    assert str(raised.value).startswith(f"example.yaml:6: models[1].{key}: ")
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', "chat.jsonl:2: has no field 'text', only 'txt'"),
        ('{"text": "a"}\n\n{"text": \n', "chat.jsonl:3: is not JSON: "),
        ('{"text": 3}\n', "chat.jsonl:1: text is a int, not text"),
        ('["text"]\n', "chat.jsonl:1: is no JSON object"),
        ("\n\n", "chat.jsonl has empty lines alone"),
        ('{"text": ""}\n' * 2, "chat.jsonl has empty texts (text) alone"),
        ('{"text": "a\\ud800"}\n', "chat.jsonl:1: text has half a character, '\\ud800'"),
        ("", "chat.jsonl is empty"),
    ],
)
def test_mistakes_in_data_name_line_and_key(folder: Path, content: str, problem: str) -> None:
    (folder / "chat.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="example") as raised:
        read(folder, (TUNING, TUNING + "\n  data: {jsonl: chat.jsonl}"))
    assert str(raised.value).startswith(f"example.yaml:17: workload.data.jsonl: {problem}")


def test_a_folder_is_no_text_and_a_data_set_needs_its_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments.matrix import workloads

    with pytest.raises(ValueError, match=r"workload\.data\.text: \. is a folder, not a file"):
        read(folder, (TUNING, TUNING + "\n  data: {text: .}"))
    monkeypatch.setattr(workloads.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="17: workload.data.dataset: needs the package datasets"):
        read(folder, (TUNING, TUNING + "\n  data: {dataset: squad}"))


def test_a_name_that_is_no_path_is_looked_for_on_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ValueError, match=r"models\[1\]\.config: .*'Qwen/none': is no path, and co"):
        read(folder, (LLAMA, "name: llama-b, config: Qwen/none"))
