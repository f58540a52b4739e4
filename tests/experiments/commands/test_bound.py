"""``python -m experiments bound``: the paper's points, by the closed form."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from simulation.bound import BoundRecord, read


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[BoundRecord]:
    folder = tmp_path_factory.mktemp("bound")
    (folder / "bound.jsonl").write_text("of an earlier time\n")  # written anew, not once more
    result = CliRunner().invoke(app, ["bound", "--output", str(folder)])
    assert result.exit_code == 0, result.output
    assert "simulated" in result.output
    return read(folder / "bound.jsonl")


def test_each_size_is_bound_at_both_bandwidths(found: list[BoundRecord]) -> None:
    bounds = {(r.point.model, r.point.bandwidth_bits_per_s / 1e9): r.hfu_bound for r in found}
    assert len(bounds) == len(found) == 12
    assert bounds["13B", 200] == pytest.approx(3.10, rel=0.01)
    assert bounds["310B", 100] == pytest.approx(0.39, rel=0.02)
    assert {record.evidence for record in found} == {"simulated"}


def test_memory_is_worth_what_bandwidth_is(found: list[BoundRecord]) -> None:
    for record in found:
        assert record.gains.twice_bandwidth == pytest.approx(2)
        assert record.gains.twice_free_memory == pytest.approx(2)
        assert record.gains.longer_sequences > 1 > record.gains.longer_sequences_tokens_per_s


def test_the_required_bandwidth_is_where_the_bound_is_one(found: list[BoundRecord]) -> None:
    for record in found:
        needed = record.point.bandwidth_bits_per_s / record.hfu_bound
        assert record.required_bits_per_s == pytest.approx(needed)
        assert 0 < record.best_mfu <= 1 + 1e-9
