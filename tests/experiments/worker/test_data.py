"""The text that cells train on, and how the ranks draw from it."""

import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch

from experiments.worker import workloads


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return workloads.corpus()


def library_of(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Have Python's sources be in ``directory``."""
    paths = {**sysconfig.get_paths(), "stdlib": str(directory)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)


def draw(text: torch.Tensor, count: int, *, rank: int = 0, seed: int = 0) -> torch.Tensor:
    batches = workloads.micro_batches(text, rank=rank, seed=seed, sequences=3, sequence_length=16)
    return torch.stack(list(islice(batches, count)))


def test_the_corpus_is_the_standard_library(text: torch.Tensor) -> None:
    assert text.dtype == torch.uint8
    assert text.dim() == 1
    assert 2**16 <= len(text) <= 4 * 2**20
    content = bytes(text.tolist())
    first, second, *_ = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    assert content.startswith(first.read_bytes() + second.read_bytes())
    assert content.count(b"import ") > 100


def test_a_long_corpus_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library_of(monkeypatch, tmp_path)
    (tmp_path / "b.py").write_bytes(b"b" * 2**22)
    (tmp_path / "a.py").write_bytes(b"a" * 2**20)
    (tmp_path / "c.txt").write_bytes(b"c" * 2**20)
    content = bytes(workloads.corpus().tolist())
    assert content == b"a" * 2**20 + b"b" * (3 * 2**20)


@pytest.mark.parametrize("size", [0, 2**16 - 1])
def test_missing_sources_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    library_of(monkeypatch, tmp_path)
    if size:
        (tmp_path / "tiny.py").write_bytes(b"#" * size)
    with pytest.raises(ValueError, match="install Python with its sources") as caught:
        workloads.corpus()
    assert f"{tmp_path}: holds {size} bytes" in str(caught.value)


def test_micro_batches_are_windows_of_the_text(text: torch.Tensor) -> None:
    batches = draw(text, 5)
    assert batches.shape == (5, 3, 17)
    assert batches.dtype == torch.int64
    content = bytes(text.tolist())
    for sequence in batches.flatten(0, 1).tolist():
        assert bytes(sequence) in content


def test_every_rank_seed_and_micro_batch_draws_its_own(text: torch.Tensor) -> None:
    drawn = [
        tuple(batch.flatten().tolist())
        for seed in range(3)
        for rank in range(4)
        for batch in draw(text, 5, rank=rank, seed=seed)
    ]
    assert len(set(drawn)) == 3 * 4 * 5
    # And every part of the text is drawn.
    short = torch.arange(20, dtype=torch.uint8)
    starts = {int(sequence[0]) for sequence in draw(short, 100).flatten(0, 1)}
    assert starts == set(range(20 - 17))
