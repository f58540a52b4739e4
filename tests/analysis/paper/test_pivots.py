"""A pivot shows every system's cells and how they ended."""

from typing import Any

from analysis.load.rows import Row
from analysis.paper import tables
from analysis.paper.contents import Pivot


def row(strategy: str, link: str, speed: float | None, state: Any = "ok") -> Row:
    chosen = {"strategy": strategy, "link": link, "model": "gpt-30b", "nodes": 2}
    return Row(chosen, state, "simulated", {} if speed is None else {"tokens_per_s": speed})


def pivot(**changes: Any) -> Pivot:
    defaults = {"id": "p", "title": "Tokens/s", "matrix": "m", "quantity": "tokens_per_s"}
    return Pivot.model_validate({**defaults, "columns": "link", **changes})


ROWS = [
    row("fcdp", "1 Gbit/s", 50),
    row("fcdp", "100 Gbit/s", 200),
    row("fsdp2", "1 Gbit/s", None, "oom"),
    row("fsdp2", "100 Gbit/s", 100),
    row("zero3", "100 Gbit/s", 80),
]


def test_every_system_has_its_cells_and_how_they_ended() -> None:
    table = tables.pivoted(pivot(), ROWS)
    lines = table.frame.itertuples(index=False)
    assert [line[1:] for line in lines] == [("oom", "100"), ("–", "80.0"), ("50.0", "200")]
