"""Mistakes at the command line: one line that says what is wrong, never a raw error."""

import re
import shlex
import shutil
import time
from pathlib import Path

import pytest

from experiments.commands import COMMANDS, load, summary
from experiments.matrix.files import MATRICES
from tests.experiments.command_line import command
from tests.experiments.stand_in import matrix_file

_WORDS = re.compile(r"--[\w-]+|\w[\w./=-]*\w|\w")
#: Options of a cluster that can be planned for; of one given twice, the last counts.
_CLUSTER = "--model gpt-10b --nodes 4 --gpus 8 --gpu a40 --inter-node 1Gbps"
#: Seconds of a command that asks a hub once, with two to wait, after the first one's imports.
WITHIN_S = 10
#: Commands, and below each how its error begins; HERE is the folder of ``somewhere``.
_MISTAKES = """\
run volume --cluster simulated --output /proc/x
    --output = '/proc/x': records cannot be written there: nothing can be made there
run volume --cluster simulated --output HERE/file/x
    --output = 'HERE/file/x': records cannot be written there: HERE/file is a file, not a
run quikstart
    MATRIX: unknown matrix 'quikstart'; did you mean 'quickstart'? allowed: ablation,
run HERE/small.yaml --set setps=1
    --set setps: unknown key 'setps'; did you mean 'steps'? allowed:
run HERE/small.yaml --set 'data={jsonl: empty.jsonl}'
    --set data: empty.jsonl has empty texts (text) alone
run HERE/small.yaml --set 'data={jsonl: half.jsonl}'
    --set data: half.jsonl:1: text has half a character, '\\ud800'
run HERE/small.yaml --set 'data={library: python, tokenizer: no/folder}'
    --set data: 'no/folder': is no path, and could not be had from the hub
run HERE/config.yaml
    config.yaml:5: models[0].config: model = 'no/folder': is no path, and could not be had
run HERE/weights.yaml
    weights.yaml:5: models[0].weights: 'no/folder' is not allowed: input should be 'random' or
run HERE/small.yaml --set 'data={jsonl: deep.jsonl}'
    --set data: deep.jsonl:1: is not JSON: maximum recursion depth exceeded
run HERE/small.yaml --set 'data={text: ~nobody-at/all}'
    --set data: there is no file or folder ~nobody-at/all beside this matrix file
run none/at/all.yaml
    MATRIX: there is no file none/at/all.yaml
run quickstart --only zero9
    --only: no cell id matches 'zero9';
run paper/volume --cluster emulated
    --cluster emulated: the matrix is for
run README.md
    MATRIX: README.md is no matrix, which is a file that ends in .yaml
run HERE/empty
    MATRIX: the folder HERE/empty holds no file that ends in .yaml
run quickstart --instance g5.48xlarge
    --instance goes with --dry-run, of a matrix on rented nodes
run quickstart --dry-run --instance g5.48xlarge --cluster emulated
    --instance goes with --dry-run, of a matrix on rented nodes
run quickstart --dry-run --instance g5
    instance = 'g5': allowed are
matrix new HERE/file/x.yaml
    FILE = 'HERE/file/x.yaml': cannot be written: HERE/file is
trace volume --only fcdp-full --output /proc/x
    --output = '/proc/x': cannot be written:
trace HERE/empty --only fcdp
    MATRIX: HERE/empty is a folder; give one of its files
trace HERE/small.yaml --only fcdp --output HERE/trace.json
    --only: 2 cells match 'fcdp', give one: fcdp-full-tiny-100mbit
show nowhere
    nowhere: no such file or directory
show docs
    docs: holds no records.jsonl
show results/ablation:polcy=disk
    results/ablation: there is no setting 'polcy'; did you mean 'policy'?
compare results results/ablation
    results: holds
compare results/ablation results/baselines
    results/ablation and results/baselines have no cell in common
bound --output HERE/file
    --output = 'HERE/file/bound.jsonl': cannot be written: HERE
validate HERE/empty
    HERE/empty: holds no records.jsonl; python -m experiments run writes them
validate --calibrate
    RESULTS: is missing; with --calibrate say
memory --model 30B --output HERE
    model = '30B': allowed are gpt-10b, gpt-20b, gpt-30b
memory --strategy fcpd --output HERE
    strategy = 'fcpd': allowed are
memory --length 4096 --output HERE
    length = 4096: allowed are 512, 1024, 2048
memory --model gpt-10b --strategy ddp --output HERE/records
    --output = 'HERE/records/memory.jsonl': cannot be written:
preflight --bandwidth fast
    'fast' is not a bandwidth; allowed:
preflight --output tests
    --output = 'tests': cannot be written:
run HERE/small.yaml --resume --dry-run --output HERE/damaged
    HERE/damaged/records.jsonl:1: not a record of this version
run HERE/huge.yaml
    fcdp-full-huge-10mbit-k1-381389d6 needs about 29.7 TB, and this machine has
preflight --cluster rented
    no rented nodes: set FCDP_HOSTS
plan --model gpt-30b --gpu a40 --preflight HERE/none
    HERE/none: no such file or directory
plan --model gpt-10b --gpus 8 --gpu a40 --inter-node 1Gbps
    --nodes is missing: give it, or what was measured (--preflight)
plan --model gpt-10b --nodes 4 --gpus 8 --gpu a40
    --inter-node is missing: give it, or what was measured
plan CLUSTER --gpu a41
    gpu = 'a41': allowed are a40,
plan CLUSTER --inter-node -1Gbps
    --inter-node = '-1Gbps': allowed: a number above 0 and a unit
plan CLUSTER --nodes 0
    --nodes = '0': allowed: whole numbers, 1 or more
plan CLUSTER --host-memory '0 GiB'
    --host-memory = '0 GiB': allowed: bytes, 1 or more
plan CLUSTER --peft dora:8
    --peft = 'dora:8': allowed: lora:RANK
plan CLUSTER --strategies zero9
    strategy = 'zero9': allowed are deepspeed-zero3,
plan CLUSTER --policies hosts --strategies fcdp
    policy = 'hosts': allowed are
plan CLUSTER --policies hosts --strategies fsdp2
    policy = 'hosts': allowed are
plan CLUSTER --checkpointing 2
    --checkpointing = '2': allowed: numbers from 0 to 1
plan CLUSTER --tokens 0
    --tokens = '0': allowed: a number above 0
plan CLUSTER --json HERE
    --json = 'HERE': cannot be written:
plan CLUSTER --server 100Gbps
    --server = '100Gbps': allowed: a bandwidth and a number of NVMe drives
plan CLUSTER --server 100Gbps,0
    --server = '0': allowed:
plan CLUSTER --server fast,2
    --server = 'fast': allowed:
""".splitlines()


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a matrix, a file and an empty folder in it, and folders in files' places."""
    folder = tmp_path_factory.mktemp("somewhere")
    (folder / "file").touch()
    for name in ("empty", "damaged", "records/memory.jsonl"):
        (folder / name).mkdir(parents=True)
    (folder / "damaged/records.jsonl").write_text("{}\n")
    tiny, text = "family: gpt2, layers: 1, width: 8, heads: 1", matrix_file(folder).read_text()
    for name, model in (("config", "random"), ("weights", "no/folder")):
        keys = f"config: no/folder, weights: {model}"
        (folder / f"{name}.yaml").write_text(text.replace(tiny, keys))
    huge = "family: gpt2, layers: 96, width: 32768, heads: 8"
    (folder / "huge.yaml").write_text(text.replace(tiny, huge).replace("tiny", "huge"))
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "empty.jsonl").write_text('{"text": ""}\n')
    (folder / "half.jsonl").write_text('{"text": "a\\ud800"}\n')
    return folder


@pytest.mark.parametrize(
    ("line", "message"), [*zip(_MISTAKES[::2], map(str.strip, _MISTAKES[1::2]), strict=True)]
)
def test_a_mistake_has_one_line_and_leaves_nothing(
    line: str, message: str, somewhere: Path
) -> None:
    before = sorted(somewhere.rglob("*"))
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
def test_help_breaks_no_word_at_eighty_columns(name: str) -> None:
    """All words of its options' help are whole; the list of commands has its help's first line."""
    assert load(name).help.splitlines()[0] == summary(name)
    shown = command(name, "--help", COLUMNS="80").stdout
    assert "…" not in shown
    lines = [line.strip("│╭╮╰╯─ ") for line in shown.splitlines()]
    words = set(_WORDS.findall(" ".join(lines)))
    options = load(name).params
    for option in options:
        expected = _WORDS.findall(str(getattr(option, "help", None) or ""))
        assert set(expected) <= words, (option.name, set(expected) - words)
