"""Tied weights, modules that share a group, and heads that run chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn as nn

from tests.fcdp.upstream.models import VOCABULARY, Transformer
from tests.fcdp.upstream.running import Run, cases, steps, train_on_tokens


@cases((True, True), (True, False), (False, True), (False, False))
def test_tied_weights(run: Run, reshard: bool, checkpointing: bool) -> None:
    model = run.set_up(
        Transformer(tied=True, checkpointing=checkpointing), reshard_after_forward=reshard
    )
    train_on_tokens(run, model)


class Chunked(nn.Module):
    """A model whose head can be left to the caller."""

    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.embed, self.body = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, skip_head: bool = False) -> torch.Tensor:
        x = self.norm(self.body(self.embed(tokens)))
        return x if skip_head else self.head(x)

    def groups(self, *, tie: bool) -> list[nn.Module | list[nn.Module]]:
        if tie:
            return [self.body, [self.embed, self.norm, self.head], self]
        return [self.embed, self.body, [self.norm, self.head], self]


@cases((True, True), (True, None), (False, True), (False, None))
def test_modules_in_one_group(run: Run, tie: bool, reshard: bool | None) -> None:
    """``fully_shard([a, b])``: several modules gather at once."""
    model = Chunked(tie=tie)
    run.set_up(model, model.groups(tie=tie), reshard_after_forward=reshard)
    train_on_tokens(run, model)


def backward_by_chunks(model: Chunked, hidden: torch.Tensor, chunks: int) -> None:
    """The head's forward and backward on each chunk, then the body's backward."""
    gradients = []
    for chunk in torch.chunk(hidden.detach(), chunks, dim=1):
        part = chunk.contiguous().requires_grad_(True)
        model.head(part).square().sum().backward()
        gradients.append(part.grad)
    hidden.backward(torch.cat(gradients, dim=1))  # type: ignore[arg-type]


@cases((True, 1), (True, 2), (False, 1), (False, 2))
def test_a_loss_in_chunks(run: Run, tie: bool, micro_batches: int) -> None:
    """A loss in chunks, through the head of a group that the forward ran in part."""
    model = Chunked(tie=tie)
    run.set_up(model, model.groups(tie=tie))
    for step in steps(run, model):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            hidden = model(run.tokens(VOCABULARY, 2, 8, step=10 * step + micro), skip_head=True)
            run.see(f"hidden {step}.{micro}", hidden)
            backward_by_chunks(model, hidden, chunks=4)


@cases()
def test_a_head_that_stays_gathered_for_its_chunks(run: Run) -> None:
    """The head stays gathered while its chunks run, and is resharded by hand afterwards."""
    model = Chunked(tie=False)
    run.set_up(model, model.groups(tie=False))
    for step in steps(run, model):
        hidden = model(run.tokens(VOCABULARY, 2, 8, step=step), skip_head=True)
        for keep in (True, False):
            model.head.set_reshard_after_forward(not keep)
            model.head.set_reshard_after_backward(not keep)
            if keep:
                backward_by_chunks(model, hidden, chunks=4)
        model.head.reshard()
