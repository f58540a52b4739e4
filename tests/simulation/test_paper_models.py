"""The paper's models have the sizes that their names say."""

from __future__ import annotations

import pytest
import torch

from experiments.worker import models
from simulation.models import PAPER_MODELS, SEQUENCE_LENGTH, find
from tests.experiments.cells import cell


def parameters(name: str) -> int:
    with torch.device("meta"):
        model, _ = models.build(cell("fcdp", model=find(name), sequence_length=SEQUENCE_LENGTH))
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_name_says_the_parameters_within_five_per_cent(name: str) -> None:
    assert parameters(name) == pytest.approx(float(name[4:-1]) * 1e9, rel=0.05)


def test_the_largest_gathers_what_the_paper_says() -> None:
    """FCDP-Sched's forward of the paper's table, on two nodes of eight ranks."""
    sent = 2 * 15 / 16 * 2 * parameters("gpt-30b")
    assert sent == pytest.approx(108.18e9, rel=0.01)


def test_another_name_is_an_error_that_lists_the_models() -> None:
    with pytest.raises(ValueError, match="model = '30B': allowed are gpt-10b, gpt-20b, gpt-30b"):
        find("30B")
