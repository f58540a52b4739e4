"""The figure of the study of memory."""

from __future__ import annotations

from matplotlib.text import Annotation

from analysis.paper import figures
from tests.analysis.memory_study import study


def test_values_drawn_are_the_records() -> None:
    figure = figures.memory_study(study()).figure

    assert len(figure.axes) == 2 * 4
    first, again, *_ = figure.axes[4:]
    assert first.get_title() == "gpt-30b, 512 tokens\nfull fine-tuning"
    assert again.get_title() == "gpt-30b, 512 tokens\nfull fine-tuning, checkpointing"
    said = [item.get_text() for item in first.texts if isinstance(item, Annotation)]
    assert said == ["skipped", "8", "0", "7"]
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "ddp",
        "zero3",
        "zeropp",
        "fcdp host",
    ]
