"""scripts/setup.sh, run for real with stand-ins for Python, pip and the compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.programs import ROOT

#: Everything that the script may find besides the stand-ins.
TOOLS = "bash cat cp dirname flock ls mkdir mktemp rm sed sha256sum tail touch"

#: Logs its calls, fails where FAIL says so, and makes a virtual environment of itself. The name
#: of its environment precedes each call.
PYTHON = """#!/bin/bash
[[ $0 == */bin/python ]] && where=${0%/bin/python} && echo -n "${where##*/}: " >>"$CALLS"
echo "$*" >>"$CALLS"
[[ -n $FAIL && $* == *"$FAIL"* ]] && { echo "this is the reason"; exit 1; }
case $* in
*_base_executable*) echo "$0" ;;
-V*) echo "Python 3.12.3" ;;
"-m venv"*)
    venv=${!#}
    rm -rf "$venv" && mkdir -p "$venv/bin" && cp "$0" "$venv/bin/python" && touch "$venv/pyvenv.cfg"
    ;;
esac
exit 0
"""


#: Calls of pip that a set-up consists of: tools, torch, the project, DeepSpeed.
INSTALLS = 4
#: The arguments that only the last of them has.
BASELINES = "--group baselines"
FILES = ("constraints.txt", "constraints-paper.txt", "pyproject.toml", "scripts/setup.sh")


class Machine:
    """A checkout, and a PATH with nothing on it that a test did not ask for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls_file = root / "calls"
        for directory in ("bin", "scripts"):
            (root / directory).mkdir(parents=True)
        for name in FILES:
            shutil.copy(ROOT / name, root / name)
        for tool in TOOLS.split():
            (root / "bin" / tool).symlink_to(shutil.which(tool) or tool)
        self.has("python3", PYTHON)
        self.has("id", "#!/bin/bash\necho 1000\n")
        self.has("g++", "")
        self.has("make", "")

    def has(self, name: str, script: str) -> None:
        programs.written(self.root / "bin" / name, script)

    def lacks(self, name: str) -> None:
        (self.root / "bin" / name).unlink()

    def setup(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the script. The machine that runs the tests may have a GPU, hence TORCH."""
        self.calls_file.write_text("")
        path = str(self.root / "bin")
        fixed = {"PATH": path, "CALLS": str(self.calls_file), "FAIL": "", "TORCH": "cpu"}
        script = (shutil.which("bash") or "bash", "scripts/setup.sh", *arguments)
        return programs.ended(*script, folder=self.root, environment=fixed, within_s=120, **env)

    @property
    def installs(self) -> list[str]:
        """Arguments of pip's installs into .venv, call by call."""
        return self.installs_in(".venv")

    def installs_in(self, environment: str) -> list[str]:
        marker = f"{environment}: -m pip install --no-compile --progress-bar off "
        calls = self.calls_file.read_text().splitlines()
        return [call.removeprefix(marker) for call in calls if call.startswith(marker)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "check out")  # a space in the path is allowed


def pin(package: str, file: str = "constraints.txt") -> str:
    pins = (ROOT / file).read_text().splitlines()
    return next(line for line in pins if line.startswith(f"{package}=="))


DEEPSPEED = pin("deepspeed").removeprefix("deepspeed==")


def test_the_cpu_build_of_torch_comes_first_and_alone(machine: Machine) -> None:
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    tools, torch, rest, deepspeed = machine.installs
    assert tools == "--constraint constraints.txt pip setuptools wheel"
    assert torch.startswith("--no-deps")
    assert torch.endswith(f"https://download.pytorch.org/whl/cpu {pin('torch')}+cpu")
    pinned = "--constraint constraints.txt --no-build-isolation"
    groups = "--group experiments --group analysis --group tests --group docs"
    assert rest == f"{pinned} {groups} --editable .[differences]"
    assert deepspeed == f"{pinned} --group baselines"


def test_without_a_cpu_build_the_cuda_build_is_taken_with_a_message(machine: Machine) -> None:
    done = machine.setup(FAIL="+cpu")
    assert done.returncode == 0
    assert "taking the CUDA build from PyPI" in done.stdout
    assert machine.installs[2] == f"--no-deps {pin('torch')}"
    machine.has("nvidia-smi", "#!/bin/bash\n")
    assert machine.setup(TORCH="auto").returncode == 0
    assert machine.installs[1] == f"--no-deps {pin('torch')}"


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml", "scripts/setup.sh"])
def test_a_change_of_what_it_depends_on_sets_up_anew_and_nothing_else(
    machine: Machine, name: str
) -> None:
    assert machine.setup().returncode == 0
    assert machine.setup().stdout == "setup: .venv is up to date\n"
    assert machine.installs == []
    with (machine.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert machine.setup().returncode == 0
    assert len(machine.installs) == INSTALLS


@pytest.mark.parametrize("step", ["-m venv", "pip setuptools wheel", "--editable", "import torch"])
def test_a_failed_set_up_says_why_and_is_redone(machine: Machine, step: str) -> None:
    failed = machine.setup(FAIL=step)
    assert failed.returncode != 0
    assert "this is the reason" in failed.stderr
    assert machine.setup().returncode == 0
    assert len(machine.installs) == INSTALLS


def test_without_deepspeed_the_rest_is_complete_and_it_alone_is_tried_again(
    machine: Machine,
) -> None:
    done = machine.setup(FAIL=BASELINES)
    assert done.returncode == 0
    assert len(machine.installs) == INSTALLS
    for trial in (done, machine.setup(FAIL=BASELINES)):
        assert trial.returncode == 0
        assert "this is the reason" in trial.stderr
        assert f"DeepSpeed {DEEPSPEED} is missing in .venv" in trial.stderr
        assert "cells that need it are skipped; try again: make setup" in trial.stderr
    assert f"would install DeepSpeed {DEEPSPEED}" in machine.setup("--check").stdout
    assert machine.setup().stderr == ""
    (deepspeed,) = machine.installs
    assert deepspeed.endswith(BASELINES)
    assert machine.setup().stdout == "setup: .venv is up to date\n"
    assert machine.installs == []


def test_both_pins_come_from_nothing_in_one_call(machine: Machine) -> None:
    done = machine.setup("--pins")
    assert done.returncode == 0, done.stderr
    assert len(machine.installs) == INSTALLS
    (paper,) = machine.installs_in(".venv-paper")
    assert paper == "--constraint .venv-paper/constraints.txt --no-build-isolation deepspeed"
    constraints = (machine.root / ".venv-paper/constraints.txt").read_text().splitlines()
    assert pin("deepspeed", "constraints-paper.txt") in constraints
    assert pin("torch") in constraints
    assert pin("deepspeed") not in constraints


def test_the_other_pin_comes_on_demand_and_once(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert not (machine.root / ".venv-paper").exists()
    assert machine.setup("--pins").returncode == 0
    assert machine.installs == []
    done = machine.setup("--pins")
    assert done.stdout == "setup: .venv is up to date\nsetup: .venv-paper is up to date\n"
    with (machine.root / "constraints-paper.txt").open("a") as file:
        file.write("# changed\n")
    assert machine.setup("--pins").returncode == 0
    assert machine.installs == []
    assert len(machine.installs_in(".venv-paper")) == 1


def test_without_the_papers_pin_the_usual_one_is_complete(machine: Machine) -> None:
    failed = machine.setup("--pins", FAIL=".venv-paper/constraints.txt")
    assert failed.returncode == 1
    assert "this is the reason" in failed.stderr
    assert "DeepSpeed 0.16.2 is missing" in failed.stderr
    assert "try again: make baselines" in failed.stderr
    assert not (machine.root / ".venv-paper/setup.stamp").exists()
    assert machine.setup().stdout == "setup: .venv is up to date\n"
    assert machine.setup("--pins").returncode == 0
    assert len(machine.installs_in(".venv-paper")) == 1


def test_another_torch_comes_in_front_of_all_else_in_an_environment_of_its_own(
    machine: Machine,
) -> None:
    done = machine.setup("--torch", "2.15.0")
    assert done.returncode == 0, done.stderr
    torch, needs = machine.installs_in(".venv-2.15.0")
    assert torch.startswith("--no-deps ")
    assert torch.endswith(" torch==2.15.0+cpu")
    assert needs == "torch"
    done = machine.setup("--torch", "2.15.0")
    assert done.stdout == "setup: .venv is up to date\nsetup: .venv-2.15.0 is up to date\n"
    assert machine.setup("--torch", "nightly").returncode == 0
    assert machine.installs_in(".venv-nightly")[0].endswith("/nightly/cpu torch")
    assert machine.installs_in(".venv") == []


def test_a_torch_that_cannot_be_had_is_said_to_be_missing(machine: Machine) -> None:
    failed = machine.setup("--torch", "2.15.0", FAIL="torch==2.15.0")
    assert failed.returncode == 1
    assert "this is the reason" in failed.stderr
    assert "torch 2.15.0 is missing, for the reason above; .venv works without it" in failed.stderr
    assert not (machine.root / ".venv-2.15.0/setup.stamp").exists()
    assert machine.setup().stdout == "setup: .venv is up to date\n"
    nameless = machine.setup("--torch")
    assert nameless.returncode == 1
    assert "--torch needs a release of torch, or nightly" in nameless.stderr


@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_missing_system_packages_are_named_to_who_is_not_root(
    machine: Machine, arguments: list[str]
) -> None:
    machine.lacks("g++")
    machine.has("apt-get", "#!/bin/bash\necho called >>apt\n")
    done = machine.setup(*arguments, FAIL="Python.h")
    assert done.returncode == 1
    assert "sudo apt-get install python3-dev g++\n" in done.stderr
    assert not (machine.root / "apt").exists()
    assert not (machine.root / ".venv").exists()


def test_packages_are_named_for_the_interpreter_asked_for(machine: Machine) -> None:
    machine.has("python3.12", PYTHON)
    done = machine.setup(PYTHON="python3.12", FAIL="ensurepip")
    assert "sudo apt-get install python3.12-venv\n" in done.stderr
    machine.lacks("python3")
    done = machine.setup()
    assert "sudo apt-get install python3 python3-venv python3-dev\n" in done.stderr


def test_root_gets_them_installed(machine: Machine) -> None:
    machine.lacks("g++")
    machine.has("id", "#!/bin/bash\necho 0\n")
    machine.has("apt-get", '#!/bin/bash\necho "$*" >>apt\nln -sf make bin/g++\n')
    (machine.root / "bin/ln").symlink_to(shutil.which("ln") or "ln")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert (machine.root / "apt").read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends g++",
    ]


def test_an_old_python_and_an_unknown_build_of_torch_are_refused(machine: Machine) -> None:
    for variables, message in (
        ({"FAIL": "version_info"}, "Python 3.10 or newer is needed"),
        ({"TORCH": "rocm"}, "auto, cpu or cuda"),
    ):
        done = machine.setup(**variables)
        assert done.returncode == 1
        assert message in done.stderr


def test_a_directory_that_is_no_virtual_environment_is_left_alone(machine: Machine) -> None:
    precious = machine.root / "home" / "letter"
    precious.parent.mkdir()
    precious.write_text("dear")
    done = machine.setup(VENV="home")
    assert done.returncode == 1
    assert "not a virtual environment" in done.stderr
    assert precious.read_text() == "dear"


def test_an_environment_behind_a_link_is_left_alone(machine: Machine) -> None:
    """Another checkout's, as ``venv --clear`` would empty it."""
    others = machine.root / "others"
    (others / "bin").mkdir(parents=True)
    (others / "pyvenv.cfg").touch()
    (machine.root / ".venv").symlink_to(others)
    setup = machine.setup()
    assert setup.returncode == 1
    assert ".venv is a link" in setup.stderr
    assert (others / "pyvenv.cfg").exists()


def test_check_changes_nothing(machine: Machine) -> None:
    before = sorted(os.listdir(machine.root))
    done = machine.setup("--check")
    assert done.returncode == 0
    assert "would make .venv" in done.stdout
    assert sorted({*os.listdir(machine.root)} - {"calls"}) == before
    assert machine.installs == []
