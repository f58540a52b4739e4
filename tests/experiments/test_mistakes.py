"""Mistakes at the command line: one line that says what is wrong, never a raw error."""

import shlex
import shutil
import time
from pathlib import Path

import pytest

from experiments.commands import COMMANDS, load, summary
from experiments.matrix.files import MATRICES
from tests.experiments.command_line import command
from tests.experiments.golden import cases
from tests.experiments.stand_in import matrix_file

#: Options of a cluster that can be planned for; of one given twice, the last counts.
_CLUSTER = "--model gpt-10b --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps"
#: Seconds of a command that asks a hub once, with two to wait, after the first one's imports.
WITHIN_S = 10
#: Commands, and below each how its error begins; HERE is the folder of ``somewhere``.
_MISTAKES = cases(Path(__file__).with_name("mistakes.txt"))


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a matrix, a file and an empty folder in it, and folders in files' places."""
    folder = tmp_path_factory.mktemp("somewhere")
    (folder / "file").touch()
    for name in ("empty", "damaged", "records/memory.jsonl"):
        (folder / name).mkdir(parents=True)
    (folder / "damaged/records.jsonl").write_text("{}\n")
    tiny, text = "family: gpt2, layers: 1, width: 8, heads: 1", matrix_file(folder).read_text()
    (folder / "config.yaml").write_text(text.replace(tiny, "config: no/folder"))
    huge = "family: gpt2, layers: 96, width: 32768, heads: 8"
    (folder / "huge.yaml").write_text(text.replace(tiny, huge).replace("tiny", "huge"))
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "damaged/memory.jsonl").write_text("{}\n")
    for name, content in (("none", b""), ("list", b"- 1"), ("latin", b"name: a\nb: \xff\n")):
        (folder / f"{name}.yaml").write_bytes(content)
    return folder


@pytest.mark.parametrize("line", _MISTAKES)
def test_a_mistake_has_one_line_and_leaves_nothing(line: str, somewhere: Path) -> None:
    (message,), before = _MISTAKES[line], sorted(somewhere.rglob("*"))
    words = line.replace("CLUSTER", _CLUSTER).replace("HERE", str(somewhere))
    started = time.monotonic()
    result = command(*shlex.split(words))
    assert time.monotonic() - started < WITHIN_S
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}".replace("HERE", str(somewhere)))
    assert len(result.stderr.splitlines()) == 1
    assert "Errno" not in result.stderr
    assert sorted(somewhere.rglob("*")) == before


def test_a_folder_of_own_matrices_runs_as_a_suite(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("volume", "quickstart"):
        shutil.copy(MATRICES / f"{name}.yaml", mine)
    result = command("run", str(mine), "--dry-run")
    assert result.exit_code == 0, result.stderr
    totals = [line for line in result.stdout.splitlines() if " cells to run, " in line]
    assert [line.partition(":")[0] for line in totals] == ["quickstart", "volume"]
    shutil.copy(MATRICES / "volume.yaml", mine / "copy.yaml")
    result = command("run", str(mine), "--dry-run")
    assert result.stderr.startswith("error: MATRIX: 2 of its matrices are named 'volume'; each")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_help(name: str) -> None:
    assert load(name).help.splitlines()[0] == summary(name)
