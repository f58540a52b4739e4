"""Blocks are found where nobody names them, or the error names what they may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn as nn

from fcdp.blocks import find_blocks
from tests.fcdp.test_peft import make_model


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(experts))


class Other(Block):
    pass


@pytest.mark.parametrize("kind", ["full", "lora", "dora", "prefix", "head"])
def test_blocks_are_found_inside_of_pefts_wrapper(kind: str) -> None:
    model, blocks = make_model(kind)
    assert find_blocks(model) == blocks


def test_the_blocks_are_the_list_that_holds_most_and_is_in_no_other() -> None:
    layers = nn.ModuleList(Block(9) for _ in range(3))
    model = nn.ModuleDict(
        {
            "heads": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "layers": layers,
            "drops": nn.ModuleList(nn.Dropout() for _ in range(5)),
        }
    )
    assert find_blocks(model) == list(layers)


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(Block(2), Block(2)),
        nn.ModuleDict({"0": Block(2), "1": Block(2)}),  # as torchtitan numbers them
        nn.ModuleList([Block(2), Other(2), Block(2)]),
    ],
    ids=["sequential", "numbered", "of two classes"],
)
def test_lists_of_other_forms_count(layers: nn.Module) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 2), "layers": layers})
    assert find_blocks(model) == list(layers.children())


def test_blocks_of_encoder_and_decoder_are_blocks_together() -> None:
    coder: Any = nn.ModuleDict({"encoder": nn.ModuleList([Block(2)])})
    coder["decoder"] = nn.ModuleList([Block(3), Block(3)])
    assert find_blocks(coder) == [*coder["encoder"], *coder["decoder"]]


class Named(nn.ModuleDict):
    _no_split_modules = ("Block", "Other")


def test_classes_that_are_not_to_be_split_are_blocks_together() -> None:
    parts = {"vision": nn.ModuleList([Other(2)]), "text": nn.ModuleList([Block(2)])}
    wrapped = nn.ModuleDict({"base": Named(parts)})
    assert find_blocks(wrapped) == [*parts["vision"], *parts["text"]]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.ModuleDict({"seen": nn.ModuleList([Other(2)]), "read": nn.ModuleList([Block(2)])}),
            "seen (1 × Other), read (1 × Block); pass the modules to gather one at a time, such as "
            "units=model.seen",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 9)),
            "Sequential has no list of blocks (nn.ModuleList); pass the modules to gather one at a "
            "time. Its largest parts are 2 (Linear, 36 parameters), 0 (Linear, 9 parameters)",
        ),
        (nn.Linear(2, 2), "its own parameters alone"),
    ],
    ids=["two lists", "no list", "no part"],
)
def test_an_error_lists_candidates(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=r"^units: ") as raised:
        find_blocks(model)
    assert words in str(raised.value)
