"""The text that cells train on, how the ranks draw from it, and what they hold out."""

import re
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from experiments.records import workload
from experiments.records.cell import Cell
from experiments.records.workload import Dataset, JsonLines, Library, Origin, TextFile
from experiments.worker import workloads
from tests.experiments import own_model
from tests.experiments.cells import cell

WHERE = "mine.yaml:7: workload.data"
PROSE = "In the beginning was the word, and the wörd was plain. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prose.txt").write_text(PROSE, encoding="utf-8")
    lines = '{"said": "the word"}\n\n{"said": "wörd", "by": "b"}\n'
    (tmp_path / "chat.jsonl").write_text(lines, encoding="utf-8")
    save_tokenizer(tmp_path / "words")
    return tmp_path


def save_tokenizer(folder: Path) -> None:
    """Words are tokens: 1 the, 2 word, 3 plain; 0 all others; 4 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "the": 1, "word": 2, "plain": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", eos_token="<end>"
    ).save_pretrained(folder)


def of(folder: Path, data: Any, sequence_length: int = 4, **settings: Any) -> Cell:
    origin = Origin(folder=str(folder), data=WHERE)
    return cell("fcdp", data=data, origin=origin, sequence_length=sequence_length, **settings)


def prose(folder: Path, **more: Any) -> TextFile:
    return TextFile(text="prose.txt", digest=workload.digest(folder / "prose.txt"), **more)


def chat(folder: Path, **more: Any) -> JsonLines:
    digest = workload.digest(folder / "chat.jsonl")
    return JsonLines(jsonl="chat.jsonl", field="said", digest=digest, **more)


def test_files_byte_by_byte(folder: Path) -> None:
    token_ids = workloads.tokens(of(folder, prose(folder)), 256)
    assert bytes(token_ids.tolist()) == PROSE.encode()
    token_ids.zero_()  # its own pages: the file stays as it is
    assert (folder / "prose.txt").read_text(encoding="utf-8") == PROSE
    lines = workloads.tokens(of(folder, chat(folder)), None)
    assert bytes(lines.tolist()).decode() == "the word\nwörd"


def test_tokens_of_a_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = workloads.tokens(of(folder, prose(folder, tokenizer="./words")), 5)
    assert words.tolist() == [0, 1, 0, 0, 1, 2, 0, 0, 1, 0, 0, 3, 0]
    # The end of text stands between documents.
    lines = workloads.tokens(of(folder, chat(folder, tokenizer="./words"), sequence_length=2), 5)
    assert lines.tolist() == [1, 2, 4, 0]
    monkeypatch.setattr(workloads, "_CORPUS_BYTES", 2**18)
    library = workloads.tokens(of(folder, Library(tokenizer="./words")), 5)
    assert set(library.tolist()) == {0, 1, 2, 3}


def test_a_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, subset, split))
        return [{"said": "a word"}, {"said": "or two"}]

    module: Any = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    named = Dataset(dataset="names", subset="en", split="test", field="said")
    assert bytes(workloads.tokens(of(folder, named), 256).tolist()) == b"a word\nor two"
    local = Dataset(dataset="./words", field="said")
    workloads.tokens(of(folder, local), 256)
    assert asked == [("names", "en", "test"), (str(folder / "words"), None, "train")]
    with pytest.raises(ValueError, match=r"dataset: row 0: has no field 'text', only 'said'"):
        workloads.tokens(of(folder, Dataset(dataset="names")), 256)


def problem(invalid: Cell, vocabulary: int = 256) -> str:
    with pytest.raises(ValueError, match=re.escape(WHERE)) as raised:
        workloads.tokens(invalid, vocabulary)
    return str(raised.value).removeprefix(WHERE)


def test_what_is_not_on_a_node_names_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = of(folder, prose(folder)), of(folder, chat(folder, tokenizer="./words"))
    (folder / "prose.txt").write_text("another text of another node", encoding="utf-8")
    (folder / "chat.jsonl").unlink()
    assert problem(cells[0]) == (
        f".text: {folder}/prose.txt is another file on this node than it was for the runner"
    )
    assert problem(cells[1]) == (
        f".jsonl: there is no {folder}/chat.jsonl on this node; each node needs it, at the same "
        "path"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert problem(of(folder, Dataset(dataset="squad"))).startswith(
        ".dataset: needs the package datasets on each node: "
    )
    (folder / "words" / "tokenizer.json").unlink()
    assert problem(of(folder, prose(folder, tokenizer="./words"))).startswith(
        ".tokenizer: no tokenizer ./words on this node: "
    )


def test_tokens_are_below_the_vocabulary_and_a_text_has_a_sequence(folder: Path) -> None:
    error = problem(of(folder, prose(folder)), vocabulary=128)
    assert error == (
        ": prose.txt has token 195, and the vocabulary of model gpt2-2x128 has 128: tokens must be "
        "below that"
    )
    size = len(PROSE.encode())
    assert len(workloads.tokens(of(folder, prose(folder), sequence_length=size - 2), 256)) == size
    error = problem(of(folder, prose(folder), sequence_length=size - 1))
    assert error == (
        f": prose.txt has {size} tokens, of which sequence_length = {size - 1} needs {size + 1}"
    )


def test_held_out_sequences_are_the_end_and_not_trained_on() -> None:
    def split(held_out: int) -> tuple[torch.Tensor, torch.Tensor]:
        short = cell("fcdp", held_out=held_out, sequence_length=4)
        return workloads.split(torch.arange(200, dtype=torch.uint8), short)

    training, last = split(3)
    assert training.tolist() == list(range(180))
    assert last.tolist() == [[*range(first, first + 5)] for first in (180, 186, 193)]
    assert last.dtype == torch.int64
    assert len(split(4)[1]) == 4
    with pytest.raises(ValueError, match=r"held_out = 5: the last 10% of standard library have 20"):
        split(5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("float_loss", "returned a float"),
        ("vector_loss", "returned a tensor of shape (2,)"),
        ("detached_loss", "returned a tensor that depends on no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_names_the_key(loss: str, message: str) -> None:
    where = "mine.yaml:9: workload.loss"
    named = f"tests.experiments.own_model:{loss}"
    invalid = cell("fcdp", loss=named, origin=Origin(loss=where), sequence_length=4)
    model = own_model.Model()
    batch = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape(f"{where}: {named} {message}")) as raised:
        workloads.TextWorkload(invalid, model, 0).loss(model, batch)
    assert len(str(raised.value).splitlines()) == 1


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return workloads.corpus()


def draw(text: torch.Tensor, count: int, rank: int = 0, seed: int = 0) -> torch.Tensor:
    batches = workloads.micro_batches(text, rank=rank, seed=seed, sequences=3, sequence_length=16)
    return torch.stack(list(islice(batches, count)))


def test_the_corpus_is_the_standard_library(text: torch.Tensor) -> None:
    assert 2**16 <= len(text) <= 4 * 2**20
    content = bytes(text.tolist())
    first, second, *_ = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    assert content.startswith(first.read_bytes() + second.read_bytes())
    assert content.count(b"import ") > 100


def test_missing_sources_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    paths = {**sysconfig.get_paths(), "stdlib": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    (tmp_path / "tiny.py").write_bytes(b"#" * (2**16 - 1))
    with pytest.raises(ValueError, match="install Python with its sources") as caught:
        workloads.corpus()
    assert f"{tmp_path}: holds 65535 bytes" in str(caught.value)


def test_every_rank_seed_and_micro_batch_draws_windows_of_its_own(text: torch.Tensor) -> None:
    content = bytes(text.tolist())
    drawn = [batch for seed in range(3) for rank in range(4) for batch in draw(text, 5, rank, seed)]
    assert {(batch.shape, batch.dtype) for batch in drawn} == {((3, 17), torch.int64)}
    assert len({bytes(batch.flatten().tolist()) for batch in drawn}) == 3 * 4 * 5
    assert all(bytes(sequence) in content for batch in drawn for sequence in batch.tolist())
    # And every part of the text is drawn.
    short = torch.arange(20, dtype=torch.uint8)
    starts = {int(sequence[0]) for sequence in draw(short, 100).flatten(0, 1)}
    assert starts == set(range(20 - 17))
