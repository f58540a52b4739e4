"""Data of a cell: its batches, and the loss and the metrics of a model on one.

A batch is one tensor. Strategies hand it on to the workload's loss, which alone knows its form.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from baselines.strategy import Loss, causal_loss
from experiments.records import workload
from experiments.records.cell import Cell
from experiments.worker import images, models
from fcdp import Topology


def of(cell: Cell, model: nn.Module, topology: Topology) -> TextWorkload | images.ImageWorkload:
    """The cell's workload on this rank.

    Raises ``ValueError`` naming line and key for data that cannot be had or are not the model's.
    """
    if isinstance(cell.data, workload.Images):
        return images.ImageWorkload(cell, cell.data, topology.rank, topology.world_size)
    return TextWorkload(cell, model, topology.rank)


class TextWorkload:
    """Sequences drawn from one long text: int64 (sequences, tokens + 1)."""

    #: Fields of a measurement that ``measure`` gives, in its order.
    metrics: Sequence[str] = ("held_out_loss",)

    def __init__(self, cell: Cell, model: nn.Module, rank: int) -> None:
        token_ids = tokens(cell, models.vocabulary(model))
        self._training, self._held_out = split(token_ids, cell)
        self._cell, self._rank = cell, rank
        #: The mean loss of a batch, also of a held-out one, as a scalar. It calls the model once.
        self.loss = self.measure = _loss(cell)

    def batches(self) -> Iterator[torch.Tensor]:
        """This rank's endless micro-batches: a seed has the same ones under all strategies."""
        return micro_batches(
            self._training,
            rank=self._rank,
            seed=self._cell.seed,
            sequences=self._cell.micro_batch,
            sequence_length=self._cell.sequence_length,
        )

    def held_out(self) -> Iterator[torch.Tensor]:
        """The held-out examples in micro-batches, the same on all ranks; maybe none."""
        if len(self._held_out):
            yield from self._held_out.split(self._cell.micro_batch)


def _loss(cell: Cell) -> Loss:
    if cell.loss == Cell.model_fields["loss"].default:
        return causal_loss
    where = cell.origin.key("loss")
    function = models.find_function(cell.loss, where)

    def checked(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = function(model, batch)
        if not isinstance(loss, torch.Tensor):
            wrong = f"a {type(loss).__name__}"
        elif loss.numel() != 1:
            wrong = f"a tensor of shape {tuple(loss.shape)}"
        elif torch.is_grad_enabled() and not loss.requires_grad:
            wrong = "a tensor that depends on no parameter, as after .detach() and .item()"
        else:
            return loss
        raise ValueError(
            f"{where}: {cell.loss} returned {wrong}; it must return the mean loss of the batch, a "
            "tensor of one number to call backward() on"
        )

    return checked


#: Bytes of Python's own sources that are read: real text that every machine has.
_CORPUS_BYTES = 4 * 2**20
#: Share of the tokens, the last, on which nothing trains where sequences are held out of it.
HELD_OUT_SHARE = 0.1


def tokens(cell: Cell, vocabulary: int | None) -> torch.Tensor:
    """All of the cell's tokens in their order: bytes, or what its tokenizer makes of the text.

    Raises ``ValueError`` naming line and key where the data are not on this node, differ from the
    runner's, are too short for one sequence, or have tokens outside of the model's vocabulary.
    """
    spec = cell.data
    assert not isinstance(spec, workload.Images), "the reader refuses other cells"
    token_ids = _bytes(spec, cell) if spec.tokenizer is None else _tokenised(spec, cell)
    where = cell.origin.key("data")
    least = cell.sequence_length + 2
    if len(token_ids) < least:
        raise ValueError(
            f"{where}: {cell.data.name} has {len(token_ids)} tokens, of which sequence_length = "
            f"{cell.sequence_length} needs {least}"
        )
    largest = int(token_ids.max())
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(
            f"{where}: {cell.data.name} has token {largest}, and the vocabulary of model "
            f"{cell.model.name} has {vocabulary}: tokens must be below that"
        )
    return token_ids


def split(token_ids: torch.Tensor, cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens to train on, and the cell's held-out sequences, int64 (sequences, tokens + 1).

    The sequences are spread evenly over the last ``HELD_OUT_SHARE`` and do not overlap. Raises
    ``ValueError`` where so many do not fit in there.
    """
    window = cell.sequence_length + 1
    if cell.held_out == 0:
        return token_ids, torch.empty(0, window, dtype=torch.int64)
    cut = len(token_ids) - int(len(token_ids) * HELD_OUT_SHARE)
    training, last = token_ids[:cut], token_ids[cut:]
    most = len(last) // window
    if cell.held_out > most or len(training) <= window:
        raise ValueError(
            f"held_out = {cell.held_out}: the last {HELD_OUT_SHARE:.0%} of {cell.data.name} have "
            f"{len(last)} tokens, which are at most {most} sequences of {window}"
        )
    starts = [index * len(last) // cell.held_out for index in range(cell.held_out)]
    return training, torch.stack([last[start : start + window] for start in starts]).long()


def corpus() -> torch.Tensor:
    """The first 4 MiB of the standard library's modules in the order of their names, as uint8.

    Raises ``ValueError`` where Python was installed without its sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _CORPUS_BYTES:
            break
    if len(text) < 2**16:
        raise ValueError(
            f"{library}: holds {len(text)} bytes of Python sources, at least {2**16} are needed "
            "to train on; install Python with its sources"
        )
    return torch.frombuffer(text[:_CORPUS_BYTES], dtype=torch.uint8)


def micro_batches(
    text: torch.Tensor, *, rank: int, seed: int, sequences: int, sequence_length: int
) -> Iterator[torch.Tensor]:
    """Endless micro-batches, int64 (sequences, sequence_length + 1); each rank draws its own."""
    generator = torch.Generator().manual_seed(seed * 100_003 + rank)
    window = sequence_length + 1
    while True:
        starts = torch.randint(len(text) - window, (sequences,), generator=generator)
        yield torch.stack([text[start : start + window] for start in starts.tolist()]).long()


def _bytes(spec: workload.AnyText, cell: Cell) -> torch.Tensor:
    if isinstance(spec, workload.Library):
        return corpus()
    if isinstance(spec, workload.TextFile):
        file = _file(spec.text, spec.digest, cell.origin.key("data", "text"), cell.origin)
        # Mapped, so that the ranks of a node share it; not shared, so that none can write to it.
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    joined = bytearray(b"\n".join(text.encode() for text in _texts(spec, cell.origin)))
    return torch.frombuffer(joined, dtype=torch.uint8)


def _tokenised(spec: workload.AnyText, cell: Cell) -> torch.Tensor:
    """Tokens of each document, and between documents the tokenizer's end of text, if it has one."""
    from transformers import AutoTokenizer

    assert spec.tokenizer is not None
    where = cell.origin.key("data", "tokenizer")
    source = cell.origin.source(spec.tokenizer, where)
    with models.telling(f"{where}: no tokenizer {spec.tokenizer} on this node"):
        tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_ids: list[int] = []
    for text in _texts(spec, cell.origin):
        token_ids += end if token_ids else []
        token_ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(token_ids, dtype=torch.int64)


def _texts(spec: workload.AnyText, origin: workload.Origin) -> Iterator[str]:
    if isinstance(spec, workload.Library):
        yield bytes(corpus().tolist()).decode(errors="replace")
    elif isinstance(spec, workload.TextFile):
        file = _file(spec.text, spec.digest, origin.key("data", "text"), origin)
        yield file.read_text(encoding="utf-8", errors="replace")
    elif isinstance(spec, workload.JsonLines):
        file = _file(spec.jsonl, spec.digest, origin.key("data", "jsonl"), origin)
        yield from workload.json_lines(file, spec.field)
    else:
        yield from _of_dataset(spec, origin)


def _file(name: str, digest: str, where: str, origin: workload.Origin) -> Path:
    """A file of the matrix's folder, checked to be the one that the runner has read."""
    file = Path(origin.source(str(origin.path(name)), where))
    if workload.digest(file) != digest:
        raise ValueError(f"{where}: {file} is another file on this node than it was for the runner")
    return file


def _of_dataset(spec: workload.Dataset, origin: workload.Origin) -> Iterator[str]:
    where = origin.key("data", "dataset")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"{where}: needs the package datasets on each node: {error}") from error
    source = origin.source(spec.dataset, where)
    with models.telling(f"{where}: {spec.source} cannot be had on this node"):
        rows = load_dataset(source, spec.subset, split=spec.split)
    for number, row in enumerate(rows):
        yield workload.text_of(row, spec.field, f"{where}: row {number}")
