"""Compiled blocks and whole models train as without FCDP, and none of its hooks is traced."""

from pathlib import Path
from types import CodeType

import pytest
import torch
import torch.nn as nn
from torch._dynamo.convert_frame import register_bytecode_hook

import fcdp
from tests.fcdp.upstream.models import VOCABULARY, Transformer
from tests.fcdp.upstream.running import PAIR, Run, adam, cases, train

PACKAGE = str(Path(fcdp.__file__).parent)


def train_compiled(run: Run, model: Transformer, what: str, backend: str = "aot_eager") -> None:
    """Three steps with an evaluation between them; afterwards, which of our code was traced."""
    torch._dynamo.reset()
    traced: list[str] = []

    def note(code: CodeType, _: CodeType) -> None:
        traced.append(f"{code.co_filename}:{code.co_name}")

    if what == "blocks before":
        compile_blocks(model, backend)
    run.set_up(model)
    if what == "blocks after":
        compile_blocks(model, backend)
    called: nn.Module = model
    if what == "whole":
        called = torch.compile(model, backend=backend)  # type: ignore[assignment]
    elif what == "whole in place":
        model.compile(backend=backend)

    def loss(step: int) -> torch.Tensor:
        if step == 2:
            with torch.no_grad():
                run.see("evaluated", called(run.tokens(VOCABULARY, 2, 8, step=9)))
        return called(run.tokens(VOCABULARY, 2, 8, step=step)).square().mean()

    handle = register_bytecode_hook(note)  # type: ignore[arg-type]
    try:
        train(run, model, adam(model), loss, steps=3)
    finally:
        handle.remove()
    assert traced, "nothing was compiled"
    ours = [name for name in traced if name.startswith(PACKAGE)]
    assert not ours, f"traced: {ours}"


def compile_blocks(model: Transformer, backend: str) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


@pytest.mark.system
@cases(
    ("blocks before",), ("blocks after",), ("whole", "eager"), ("whole in place",), shapes=[PAIR]
)
def test_compiled_models_train_as_without_fcdp(run: Run, *how: str) -> None:
    train_compiled(run, Transformer(2), *how)


@pytest.mark.system
@cases(shapes=[PAIR])
def test_compiled_blocks_with_checkpointing(run: Run) -> None:
    """The first layer is frozen, and recomputed in backward."""
    model = Transformer(2, checkpointing=True)
    model.layers[0].requires_grad_(False)
    train_compiled(run, model, "blocks after")
