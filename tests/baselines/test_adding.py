"""The strategy that docs/strategies.md adds loads, trains, and keeps its entries on disk."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

import baselines
from baselines import registry
from tests.baselines.test_strategies import losses
from tests.ranks import Pools

PAGE = Path(__file__).resolve().parents[2] / "docs/strategies.md"


def block(name: str) -> str:
    match = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def train_with(code: str, line: str) -> list[float]:
    entry = eval(line, vars(registry))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fcdp_disk.py").write_text(code)
        with (
            mock.patch.object(baselines, "__path__", [*baselines.__path__, folder]),
            mock.patch.object(registry, "STRATEGIES", (*registry.STRATEGIES, entry)),
        ):
            assert registry.find("fcdp-disk").builder == ("baselines.fcdp_disk", "build")
            trained = losses("fcdp-disk", "full", 1)
        del sys.modules["baselines.fcdp_disk"]
    return trained


def test_the_pages_strategy_trains(ranks: Pools) -> None:
    added = ranks.run(4, train_with, block("strategy"), block("registry"))
    for mine, expected in zip(added, ranks.run(4, losses, "fcdp", "full", 1), strict=True):
        assert mine == pytest.approx(expected, rel=1e-6, abs=0)
        assert torch.tensor(mine).isfinite().all()
