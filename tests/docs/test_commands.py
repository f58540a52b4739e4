"""Each command of README and docs is run as it is written, or ``WHY`` has the reason why not.

The others are still checked against the code: options and values are parsed, a matrix of an
emulated cluster is expanded by ``--dry-run``, make shows its target, and commands of a launcher or
an image are parsed.
"""

import functools
import os
import re
import shlex
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser
from typer.main import get_group
from typer.testing import CliRunner

import analysis.__main__
import experiments.__main__
from examples import train
from experiments.matrix.files import available
from tests import programs
from tests.docs import DOCS, ROOT, block
from tests.docs.commands import LANGUAGES, PAGES, Shown, fences, shown
from tests.programs import make

EXTEND = DOCS / "extend.md"
_APPS = {"experiments": experiments.__main__.app, "analysis": analysis.__main__.app}
_GROUPS = {name: get_group(app) for name, app in _APPS.items()}
_NETWORK = "makes network namespaces and trains for minutes; tests of the cluster do"
_SIMULATED = "simulates for minutes; tests/experiments/matrix/test_paper_suite.py has the records"
_IMAGE = "needs an image and a Docker engine; tests/launch/test_docker.py has both where it can"
_NODES = "needs nodes; tests/launch/test_launch.py runs the script with stand-ins for them"
_EARLIER = "reads what the run before it has left"
_MAKE = "sets up an environment first, for minutes to hours; .ci/run does"
#: Why a command is not run here, by how it begins; the longest beginning counts.
WHY = {
    "make ": _MAKE,
    "pip ": "installs into the environment; tests/packaging/test_wheel.py does into one of its own",
    "docker ": _IMAGE,
    "launch/": _NODES,
    "sbatch ": _NODES,
    "torchrun ": "needs nodes and a model; tests/examples/test_train.py has small ones",
    "sky ": _NODES,
    "python -m experiments run ": _NETWORK,
    "python -m experiments run paper --cluster simulated": _SIMULATED,
    "python -m experiments run paper/policies --cluster simulated": _SIMULATED,
    "python -m experiments memory": "trains 30B models on an imitated device for an hour; "
    "tests/simulation/imitated has small ones",
    "python -m experiments validate": "predicts every record, beside them; "
    "tests/experiments/commands/test_validate.py does for some",
    "python -m experiments plan --preflight": "reads what preflight measured on nodes; "
    "tests/experiments/commands/test_plan.py makes such a file",
    "python -m analysis report": "draws for minutes; tests/analysis/report/test_reproduction.py "
    "compares the document with what is committed",
    "python -m analysis check runs/paper": "reads what the run before it has left; "
    "tests/analysis/test_check.py has one",
    "python -m analysis audit runs/": _EARLIER,
    "python -m analysis table runs/mine": _EARLIER,
    "python -m experiments show runs/mine": _EARLIER,
}


def reason(command: Shown) -> str | None:
    start = max((start for start in WHY if command.called.startswith(start)), key=len, default=None)
    return None if start is None else WHY[start]


COMMANDS = {page.relative_to(ROOT).as_posix(): shown(page) for page in PAGES}
WITH_COMMANDS = [name for name, commands in COMMANDS.items() if commands]
ALL = [command for commands in COMMANDS.values() for command in commands]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository to write into: its files by links, docs in a copy, ``runs`` empty."""
    folder = tmp_path_factory.mktemp("checkout")
    for item in ROOT.iterdir():
        if item.name not in ("docs", "runs", "build", ".git"):
            (folder / item.name).symlink_to(item)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "runs").mkdir()
    return folder


def test_every_block_says_what_it_is() -> None:
    languages = Counter(language for page in PAGES for language, _ in fences(page))
    assert set(languages) <= LANGUAGES


def test_no_block_of_text_hides_a_command() -> None:
    words = ("python -m", "make ", "docker ", "$ ", "launch/", "sbatch ")
    for page in PAGES:
        for language, text in fences(page):
            if language == "text":
                assert [line for line in text.splitlines() if line.startswith(words)] == []


def test_every_reason_is_some_commands() -> None:
    assert [start for start in WHY if not any(c.called.startswith(start) for c in ALL)] == []
    assert len(ALL) > 35


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run_as_written(page: str, checkout: Path) -> None:
    """Commands are in the page's order; those that are not run are checked against the code."""
    for command in COMMANDS[page]:
        if reason(command) is None:
            printed = run(command.text, checkout)
            for part in command.prints:
                before, match, printed = printed.partition(part)
                assert match, f"{command.text}: {part}\n{before}"
        else:
            check(command, checkout)


def test_the_papers_traffic_is_judged_from_a_run_of_ones_own(checkout: Path) -> None:
    """The second command of the site's front page: each comparison passes."""
    run("python -m experiments run paper/volume", checkout)
    printed = run("python -m analysis check runs/paper/volume", checkout)
    (shown_there,) = (c for c in COMMANDS["docs/README.md"] if "analysis check" in c.text)
    assert all(part in printed for part in shown_there.prints)
    assert "FAIL" not in printed


def test_the_picture_of_a_step_is_what_its_pages_two_commands_draw(checkout: Path) -> None:
    page = "docs/simulator.md"
    texts = [c.text for c in COMMANDS[page] if c.text.endswith(("runs/trace.json", "timeline.svg"))]
    assert [text.split()[3] for text in texts] == ["trace", "timeline"]
    for text in texts:
        run(text, checkout)
    drawn, committed = (
        (folder / "docs/figures/timeline.svg").read_text(encoding="utf-8")
        for folder in (checkout, ROOT)
    )
    # Up to the version of matplotlib: their texts, and how many bars there are.
    ours, theirs = (re.findall(r"<text.*?>(.*?)</text>", each) for each in (drawn, committed))
    assert ours == theirs
    for kind in ("simulated", "profiled"):
        assert any(text.startswith(f"{kind}: fcdp-full") for text in ours)
    assert drawn.count("<path") == committed.count("<path") > 50
    assert "(figures/timeline.svg)" in (ROOT / page).read_text(encoding="utf-8")


def test_a_policy_of_ones_own_is_compared_in_a_matrix(tmp_path: Path) -> None:
    """The policy of docs/extend.md, in a module of its own; simulated, without namespaces."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my/policies.py").write_text(block("extend.md", "policy"))
    train, show = [c.text for c in COMMANDS["docs/extend.md"] if "runs/mine" in c.text]
    added = train.replace("host]", "host, my.policies:FrozenOnly]")
    assert added != train
    in_shell(f"{added} --cluster simulated", tmp_path)
    assert "FrozenOnly" in in_shell(show, tmp_path)


def run(text: str, folder: Path) -> str:
    """Run a command as a shell would; return its output without line breaks.

    One of our command lines is called in this process, which has imported what it needs.
    """
    words = shlex.split(text)
    if words[:2] != ["python", "-m"]:
        return in_shell(text, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = CliRunner(env={"COLUMNS": "80"}).invoke(_APPS[words[2]], words[3:])
    assert result.exit_code == 0, f"{text}\n{result.output}"
    return " ".join(result.stdout.split())


def in_shell(text: str, folder: Path) -> str:
    """Run a command by a shell, with this interpreter and the packages in the folder."""
    bin_ = folder / ".bin"
    bin_.mkdir(exist_ok=True)
    programs.written(bin_ / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    variables = {"PATH": f"{bin_}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    done = programs.ended("bash", "-c", text, folder=folder, within_s=300, **variables)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    return " ".join(done.stdout.split())


def check(command: Shown, folder: Path) -> None:
    """Check a command against the code without running it."""
    words = command.words
    if words[:2] == ["python", "-m"]:
        parse(words[2], words[3:])
        if words[3] == "run" and "simulated" not in words:
            expand(f"{command.text} --dry-run", folder)
    elif words[0] == "make":
        assert make("-n", *words[1:]).returncode == 0, command.text
    else:
        check_program(words)


@functools.cache
def expand(text: str, folder: Path) -> None:
    """Expand a matrix once, though several pages show it."""
    run(text, folder)


def parse(program: str, words: list[str]) -> None:
    """Parse a command line, options and values, and call nothing."""
    name, command, rest, outer = called(program, words)
    command.make_context(name, rest, parent=outer)


def called(program: str, words: list[str]) -> tuple[str, Any, list[str], Any]:
    """The command that these words call, what is left of them, and the context."""
    group = _GROUPS[program]
    outer = group.make_context(program, words[:1], resilient_parsing=True)
    name, command, rest = group.resolve_command(outer, words)
    return name, command, rest, outer


def check_program(words: list[str]) -> None:
    """A launcher's commands and an image's arguments are those of ``experiments``."""
    match words:
        case ["launch/train-ssh.sh", _, _, *options]:
            parse_training(options)
            commands = []
        case [script, _, *commands] if script.startswith("launch/"):
            assert os.access(ROOT / script, os.X_OK)
        case ["sbatch", *_]:
            (script,) = [word for word in words if word.startswith("launch/")]
            commands = words[words.index(script) + 1 :]
            if script == "launch/train.sbatch":
                parse_training(commands[1:])
                commands = []
        case ["torchrun", *_]:
            torchrun = get_args_parser().parse_args(words[1:])
            assert (ROOT / "examples" / torchrun.training_script).is_file()
            parse_training(torchrun.training_script_args)
            commands = []
        case ["sky", "launch", *_]:
            assert (ROOT / words[-1]).is_file()
            commands = []
        case ["pip", "install", "." | ".[differences]"]:
            commands = []
        case ["docker", "build", *_]:
            assert {"BASE", "TORCH"} >= {w.split("=")[0] for w in words if re.match("[A-Z]+=", w)}
            assert words[-1] == "."
            commands = []
        case ["docker", "run", *_]:
            inner = words[words.index("fcdp") + 1 :]
            commands = [] if inner == ["--help"] else [shlex.join(inner)]
        case _:
            raise AssertionError(f"{words[0]}: nobody knows how to check this")
    for text in commands:
        parse("experiments", shlex.split(text))


def parse_training(words: list[str]) -> None:
    """Options of ``examples/train.py``; the files are the reader's."""
    with mock.patch.object(Path, "is_file", return_value=True):
        train.parse(words)


def test_every_page_of_the_repository_names_what_there_is() -> None:
    """Modules, their commands, matrices and targets of make, in blocks and in sentences.

    In the README and docs also options; words in capitals are placeholders.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    matrices = {*available(), "paper", "MATRIX", "mine.yaml"}
    counts: Counter[str] = Counter()
    folders = ("baselines", "docs", "examples", "experiments", "fcdp", "launch", "results")
    inside = (page for folder in folders for page in (ROOT / folder).rglob("*.md"))
    for page in (*ROOT.glob("*.md"), *inside):
        text = page.read_text(encoding="utf-8")
        for module in re.findall(r"\bpython -m ([\w.]*\w)", text):
            assert find_spec(module), (page, module)
        for program, name in re.findall(r"\bpython -m (experiments|analysis) ([a-z]+)", text):
            called(program, [name])
        for program, call in re.findall(r"`python -m (experiments|analysis)\s+([^`]+)`", text):
            words = call.split()
            if page in PAGES and not words[0].isupper():
                command = called(program, words)[1]
                known = [command, *getattr(command, "commands", {}).values()]
                options = {name for each in known for p in each.params for name in p.opts}
                assert {w for w in words if w.startswith("--")} <= options, (page.name, words)
                counts["sentences"] += 1
        for matrix in re.findall(r"(?:\bexperiments run |EMULATED=)([\w./-]*\w)", text):
            assert matrix in matrices or (ROOT / matrix).is_file(), (page, matrix)
        for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
            assert target in targets, (page, target)
            counts["make"] += 1
        counts["modules"] += text.count("python -m ")
    assert counts["modules"] > 300
    assert counts["make"] > 30
    assert counts["sentences"] > 15
