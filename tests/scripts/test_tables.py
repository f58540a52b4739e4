"""The tables of the README and other pages, of made-up records."""

from pathlib import Path

import pytest

from experiments.records.record import Machine
from scripts import readme, tables
from tests.analysis.conftest import write_records
from tests.experiments.stand_in import cell, record


def test_what_no_link_explains_is_called_noise() -> None:
    links = (10_000_000, 100_000_000, None)
    cells = [cell(inter_bandwidth_bits_per_s=link) for link in links]
    usual = [record(of, step_seconds=[s]) for of, s in zip(cells, (3.0, 2.0, 1.0), strict=True)]
    odd = [record(of, step_seconds=[s]) for of, s in zip(cells, (3.0, 1.0, 2.0), strict=True)]
    assert "noise" not in tables.speeds(usual)
    last = tables.speeds(odd).splitlines()[-1]
    assert last.startswith("In 1 of 1 comparisons of links a slower one is faster, by up to 2.0×")


def test_a_machine_is_busy_for_the_reason_that_it_was() -> None:
    """A load alone is a reason: its host took none of its time."""
    worst = Machine(load=6.4, cores=2, steal_share=0.0)
    assert tables._busy(worst).startswith(
        "The machine was busy, at worst: a load of 6.4 on 2 cores. Times are"
    )


def test_a_page_without_a_place_for_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md: found 0 places for rivals, expected 1"):
        readme.rewritten("README.md", "# FCDP\n")


def test_phases_stand_beside_fsdp2s() -> None:
    phases = {"scoring_seconds": 1.0, "scoring_bytes": 2e6, "update_seconds": 1.0}
    slow, fast = (
        record(cell(strategy=name), step_seconds=[seconds] * 8, update_bytes=4e6, **phases)
        for name, seconds in (("fsdp2", 4.0), ("fcdp", 2.0))
    )
    first, second = tables.by_phase([slow, fast]).splitlines()[-2:]
    assert first.startswith("| fsdp2 | – | 1.00 s, 2.00 MB | 1.00 s, 4.00 MB | 4.00 s, ")
    assert "| 2.00 s, 6.30 MB | 2.0× |" in second


def test_rollouts_stand_beside_the_trainers_own_answers() -> None:
    measured = {"update_seconds": 1.0, "bits_per_parameter": 1.5, "versions_behind": 1.0}
    own, rollout = (record(cell(strategy="fcdp"), **m) for m in ({"update_seconds": 1.0}, measured))
    head, _, first, second = tables.by_rollout([own, rollout]).splitlines()
    assert head.endswith("| update s | versions behind | bits per parameter |")
    assert first.endswith("| 1 | – | – |")
    assert second.endswith("| 1 | 1 | 1.500 |")


def test_figures_beside_the_records_follow_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    folder = tmp_path / "results" / "rollout"
    (folder / "report").mkdir(parents=True)
    write_records([record(cell())], folder / "records.jsonl")
    (folder / "report" / "rollout-phases.svg").touch()
    filled = readme._drawn("rollout", tables.by_rollout)
    assert filled.endswith("\n\n![phases](rollout/report/rollout-phases.svg)")
