"""``make reproduce`` runs all matrices that have records, from where it was ended."""

from pathlib import Path

import pytest

from experiments.matrix import files
from scripts import reproduce
from simulation import yaml_lines
from tests.programs import ROOT


def test_every_matrix_that_has_committed_records_is_run() -> None:
    folders = [path.parent for path in (ROOT / "results").rglob("records.jsonl*")]
    names = {folder.relative_to(ROOT / "results").as_posix() for folder in folders}
    assert {*reproduce.committed()} == names
    for name in names:
        argument = reproduce.argument(name)
        path = ROOT / argument if argument.endswith(".yaml") else files.find(argument)
        assert yaml_lines.load(path).values["name"] == name
    assert (
        "$(EMULATED)" in (ROOT / "Makefile").read_text(encoding="utf-8").partition("reproduce:")[2]
    )


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="matrix = 'nothing': allowed are ablation, "):
        reproduce.reproduce(["nothing"])


def test_it_says_how_long_it_takes_and_ends_where_a_matrix_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A matrix with failed cells counts; the same call goes on with the one that was ended."""
    took = {name: reproduce.minutes(name) for name in ("quickstart", "delta")}
    ran, statuses = [], {"quickstart": 1, "examples/differences/matrix.yaml": 130}

    def run(*module: str) -> int:
        ran.append(module)
        return statuses.get(module[2], 0) if module[0] == "experiments" else 0

    monkeypatch.setattr(reproduce, "_run", run)
    for name, folder in {"ROOT": tmp_path, "RESULTS": tmp_path / "results"}.items():
        monkeypatch.setattr(reproduce, name, folder)
    monkeypatch.setattr(
        reproduce,
        "argument",
        {
            "quickstart": "quickstart",
            "delta": "examples/differences/matrix.yaml",
            "volume": "volume",
        }.__getitem__,
    )
    monkeypatch.setattr(reproduce, "minutes", lambda name: took.get(name, 0.0))
    monkeypatch.setattr(reproduce, "PRETRAINED", tmp_path / "weights")
    written = tmp_path / "runs" / "quickstart" / "records.jsonl"
    written.parent.mkdir(parents=True)
    written.write_text("as it was run\n")

    assert reproduce.reproduce(["quickstart", "delta", "volume"]) == 130

    resumed = ("experiments", "run", "quickstart", "--resume")
    assert ran == [
        resumed,
        (reproduce.PRETRAIN,),
        (*resumed[:2], statuses.popitem()[0], "--resume"),
    ]
    assert (tmp_path / "results/quickstart/records.jsonl").read_text() == "as it was run\n"
    output = capsys.readouterr().out
    assert f"{sum(took.values()):7.1f} min  by the committed records" in output
    assert min(took.values()) > 1
