"""The models of the FCDP paper's experiments, as far as they are known.

The paper derives GPT models of 10B, 20B and 30B parameters from GPT-2 XL and does not give their
depth and width. Our choice: GPT-2 XL's 48 layers, heads of 64 and vocabulary, and a width that
gives the size. For 30B the width is such that one forward gather of ZeRO-3 on two nodes of eight
ranks sends what the paper's table says FCDP-Sched's sends (108.18 GB: 2 nodes × 15/16 × 2 bytes per
parameter, so 28.8 billion).
"""

from __future__ import annotations

from simulation.transformer import ModelSpec

#: Tokens per sequence: our choice; questions with their paragraphs in SQuAD mostly fit in it.
SEQUENCE_LENGTH = 512
#: GPT-2's.
_VOCABULARY = 50_257
_LAYERS = 48
_HEAD_WIDTH = 64
_WIDTHS = {"gpt-10b": 4096, "gpt-20b": 5888, "gpt-30b": 7040}

#: The models by name: 9.9, 20.3 and 28.9 billion parameters.
PAPER_MODELS: dict[str, ModelSpec] = {
    name: ModelSpec(
        name=name,
        family="gpt2",
        layers=_LAYERS,
        width=width,
        heads=width // _HEAD_WIDTH,
        vocabulary=_VOCABULARY,
    )
    for name, width in _WIDTHS.items()
}


def find(name: str) -> ModelSpec:
    """The model of this name. Raises ``ValueError`` for one that is not among ``PAPER_MODELS``."""
    try:
        return PAPER_MODELS[name]
    except KeyError:
        raise ValueError(f"model = {name!r}: allowed are {', '.join(PAPER_MODELS)}") from None
