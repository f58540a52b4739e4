"""Provenance says where a record comes from, and nothing about who ran it."""

import json
import socket
from pathlib import Path

import pytest

from experiments.records import provenance
from experiments.records.provenance import ROOT, gather, scrub
from tests import programs


def test_it_names_no_path_and_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "marker-user")
    monkeypatch.setenv("SECRET", "marker-secret")
    text = json.dumps(gather().__dict__)
    assert "marker" not in text
    assert str(ROOT) not in text
    assert str(Path.home()) not in text


def test_gpus_are_named_by_driver_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_NVIDIA", tmp_path)
    assert "gpu" not in gather().hardware
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        information = "Model: \t\t NVIDIA A40\nGPU UUID: \t marker\n"
        (tmp_path / "gpus" / bus / "information").write_text(information)
    hardware = gather().hardware
    assert (hardware["gpu"], hardware["gpus"]) == ("NVIDIA A40", 2)


def test_a_container_has_as_many_cores_as_it_has_the_time_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(provenance, "_CPU_TIME", limit)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {7, 2, 3, 5})
    assert provenance.cores() == [2, 3, 5, 7]
    for text, count in (("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)):
        limit.write_text(text)
        assert provenance.cores() == [2, 3, 5, 7][:count]


def test_a_changed_tree_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        programs.printed("git", "-C", tmp_path, *identity, *arguments)

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert gather().commit is None
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "first")
    clean = gather().commit
    assert len(clean) == 40
    (tmp_path / "new.py").touch()
    assert gather().commit == f"{clean}-dirty"


def test_error_texts_lose_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(socket, "gethostname", lambda: "some-host")
    text = f'File "{ROOT}/experiments/worker.py" on some-host\n/home/somebody/data {"k" * 40}'
    assert scrub(text) == 'File "experiments/worker.py" on <host>\n~/data <WANDB_API_KEY>'


def test_long_error_texts_keep_both_ends_and_half_characters_become_utf_8() -> None:
    text = scrub("rank 3: " + "x" * 10**6 + " the cause")
    assert text.startswith("rank 3: ")
    assert text.endswith(" the cause")
    assert "characters left out" in text
    assert len(text) < 13_000
    assert scrub("half a character: \udcc3").encode("utf-8")
