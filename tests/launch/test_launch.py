"""The launch scripts, with stand-ins for ssh and docker."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.records.provenance import ROOT
from tests import programs

SKYPILOT = ROOT / "launch/skypilot.yaml"
COMMANDS = ["preflight", "run small --resume"]

#: Prefixes of the variables that a test sets itself.
_SETTINGS = ("FCDP_", "NCCL_", "SSH_AUTH_", "WANDB_")
#: A program that writes down its arguments and settings.
_TELL = """\
#!{python}
import json, os, sys
settings = {{k: v for k, v in os.environ.items() if k.startswith(("FCDP_", "NCCL_"))}}
line = json.dumps({{"arguments": sys.argv[1:], "settings": settings}})
with open({file!r}, "a") as file:
    file.write(line + "\\n")
"""


def telling(program: Path, calls: Path) -> None:
    programs.written(program, _TELL.format(python=sys.executable, file=str(calls)))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for the environment's Python, which only says how it was called."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    telling(tmp_path / "venv/bin/python", tmp_path / "python.jsonl")
    return tmp_path / "venv"


def start(
    command: list[str | Path], path: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)}
    variables = {"PATH": f"{path or ROOT}:{os.environ['PATH']}", **settings}
    return programs.ended(*command, environment=inherited, within_s=200, **variables)


def read_calls(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_calls(tmp_path: Path) -> dict[str, str]:
    """The commands ran one after another with the same settings, which are returned."""
    calls = read_calls(tmp_path / "python.jsonl")
    assert [" ".join(call["arguments"]) for call in calls] == [
        f"-m experiments {command} --cluster rented" for command in COMMANDS
    ]
    assert calls[0]["settings"] == calls[1]["settings"]
    return dict(calls[0]["settings"])


@pytest.mark.parametrize("script", ["ssh.sh", "slurm.sbatch"])
def test_ssh_runs_the_commands_for_its_hosts_and_slurm_in_its_allocation(
    tmp_path: Path, python: Path, script: str
) -> None:
    hosts, expected = [], {"NCCL_DEBUG": "WARN"}
    if script == "ssh.sh":
        hosts, expected = ["node0 node1"], {"FCDP_HOSTS": "node0 node1", **expected}
    submitted = {"SLURM_SUBMIT_DIR": str(ROOT), "NCCL_DEBUG": "WARN"}
    words = ["bash", ROOT / "launch" / script, *hosts, *COMMANDS]
    done = start(words, VENV=str(python), **submitted)
    assert done.returncode == 0, done.stderr
    assert check_calls(tmp_path) == expected


def test_a_command_has_quotes_as_in_a_shell(tmp_path: Path, python: Path) -> None:
    command = "run 'my m.yaml'\n--set \"policy=[host, disk]\""
    assert start([ROOT / "launch/commands.sh", command], VENV=str(python)).returncode == 0
    (call,) = read_calls(tmp_path / "python.jsonl")
    assert call["arguments"][3:6] == ["my m.yaml", "--set", "policy=[host, disk]"]


def test_skypilot_runs_the_commands_on_the_first_node(tmp_path: Path, python: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}
    for rank in range(2):
        variables = {"VENV": str(python), "FCDP_COMMANDS": "\n".join(COMMANDS) + "\n"}
        nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": str(rank)}
        done = start(["bash", "-c", task["run"]], **variables, **nodes)
        assert done.returncode == 0, done.stderr
    assert check_calls(tmp_path)["FCDP_HOSTS"] == "10.0.0.1 10.0.0.2"


def test_skypilots_managed_job_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "launch/train-skypilot.yaml").read_text())
    telling(tmp_path / "torchrun", tmp_path / "torchrun.jsonl")
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2"}
    ranks = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    done = start(["bash", "-c", task["run"]], tmp_path, **nodes, **ranks)
    assert done.returncode == 0, done.stderr
    (call,) = read_calls(tmp_path / "torchrun.jsonl")
    launcher = "--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port "
    assert " ".join(call["arguments"]).startswith(f"{launcher}29400 examples/train.py --model ")


def test_kubeflow_reads_all_of_the_manifest() -> None:
    """Each key is one of its schema's, with a value as that has it; others would be lost."""
    from kubeflow_trainer_api import models

    documents = [*yaml.safe_load_all((ROOT / "launch/train-kubernetes.yaml").read_text())]
    assert [each["kind"] for each in documents] == ["TrainingRuntime", "TrainJob"]
    for each in documents:
        kind = getattr(models, f"TrainerV1alpha1{each['kind']}")
        assert kind.from_dict(each).to_dict() == each


@pytest.mark.parametrize("gpus", ["all", "none"])
def test_docker_gets_the_flags_and_the_settings_by_name(tmp_path: Path, gpus: str) -> None:
    variables = {"NCCL_DEBUG": "a setting", "WANDB_API_KEY": "a key", "FCDP_GPUS": gpus}
    call = call_of_docker(tmp_path, **variables, FCDP_DOCKER_OPTIONS="--device /dev/infiniband")
    line = " ".join(call["arguments"])
    prefix = call["settings"]["FCDP_PREFIX"]
    assert call["settings"]["FCDP_HOSTS"] == "node0 node1"
    assert prefix.startswith("docker run --interactive --rm ")
    assert prefix.endswith(" fcdp")
    for part in ("--network host", "--ipc host", "--ulimit memlock=-1", "--device /dev/infiniband"):
        assert part in line
        assert part in prefix
    assert ("--gpus all" in line) == ("--gpus all" in prefix) == (gpus == "all")
    for name in ("FCDP_HOSTS", "FCDP_PREFIX", "NCCL_DEBUG", "WANDB_API_KEY"):
        assert f"--env {name} " in line
        assert name not in prefix
    assert "a setting" not in line
    assert "a key" not in line
    assert "--tty" not in line  # no terminal
    assert call["arguments"][-4:] == ["fcdp", "launch/commands.sh", *COMMANDS]


def test_operators_that_other_machines_compile_stay_in_volumes(tmp_path: Path) -> None:
    call = call_of_docker(tmp_path, FCDP_IMAGE="me/fcdp:2")
    prefix = call["settings"]["FCDP_PREFIX"]
    assert "--volume me-fcdp-2-operators:/opt/venv/operators " in prefix
    assert prefix.endswith("--volume me-fcdp-2-operators-paper:/opt/venv-paper/operators me/fcdp:2")
    assert "operators:" not in " ".join(call["arguments"])


def test_docker_is_the_account_that_calls(tmp_path: Path) -> None:
    """Else ssh refuses its settings and keys, and takes another name for the user's."""
    agent = tmp_path / "agent"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(agent))
        call = call_of_docker(tmp_path, HOME="/home/me", SSH_AUTH_SOCK=str(agent))
    line = " ".join(call["arguments"])
    for part in (
        f"--user {os.getuid()}:{os.getgid()}",
        "--volume /etc/passwd:/etc/passwd:ro",
        "--env HOME",
        "--volume /home/me/.ssh:/home/me/.ssh:ro",
        f"--env SSH_AUTH_SOCK --volume {agent}:{agent}",
    ):
        assert f"{part} " in line
        assert part not in call["settings"]["FCDP_PREFIX"]
    agent.unlink()
    assert "SSH_AUTH_SOCK" not in " ".join(call_of_docker(tmp_path)["arguments"])


def call_of_docker(tmp_path: Path, **settings: str) -> dict[str, Any]:
    """How launch/docker.sh calls a stand-in for Docker."""
    folder = tmp_path / "stand-ins"
    folder.mkdir(exist_ok=True)
    file = tmp_path / "docker.jsonl"
    file.unlink(missing_ok=True)
    telling(folder / "docker", file)
    done = start([ROOT / "launch/docker.sh", "node0 node1", *COMMANDS], folder, **settings)
    assert done.returncode == 0, done.stderr
    (call,) = read_calls(file)
    return call


def test_a_command_that_cannot_run_ends_the_script(tmp_path: Path) -> None:
    """A command that could not run (2) ends the script; a failed cell (1) does not."""
    (tmp_path / "bin").mkdir()
    programs.written(
        tmp_path / "bin/python",
        """\
        #!/usr/bin/env bash
        echo "$@"
        [[ $3 == first ]] && exit 1
        [[ $3 == second ]] && exit 2
        exit 0
        """,
    )
    command = [ROOT / "launch/commands.sh", "first", "second", "third"]
    done = start(command, VENV=str(tmp_path), FCDP_HOSTS="node0")
    assert done.returncode == 2
    assert "second" in done.stdout
    assert "third" not in done.stdout


@pytest.mark.parametrize("status", [75, 137])
def test_a_command_that_can_go_on_is_given_again(tmp_path: Path, status: int) -> None:
    """Where a node is lost or the command is killed, if it has ``--resume``."""
    (tmp_path / "bin").mkdir()
    programs.written(
        tmp_path / "bin/python",
        f"""\
        #!/usr/bin/env bash
        echo "$@" >> {tmp_path}/calls
        [[ $(wc -l < {tmp_path}/calls) -gt 3 ]] || exit {status}
        """,
    )
    programs.written(tmp_path / "bin/sleep", "#!/bin/sh\n")
    settings = {"VENV": str(tmp_path), "FCDP_HOSTS": "node0"}
    command = [ROOT / "launch/commands.sh", "run small --resume", "next"]
    done = start(command, tmp_path / "bin", **settings)
    words = ["run small --resume"] * 4 + ["next"]
    calls = [f"-m experiments {each} --cluster rented" for each in words]
    assert (done.returncode, (tmp_path / "calls").read_text().splitlines()) == (0, calls)
    assert done.stderr.count(f"ended with status {status}, and is given again") == 3
    (tmp_path / "calls").unlink()
    assert start([command[0], "run small", "next"], **settings).returncode == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_script_alone_ends_the_command(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The command tidies up, the script waits for it, and the next one does not start."""
    (tmp_path / "bin").mkdir()
    programs.written(
        tmp_path / "bin/python",
        """\
        #!/usr/bin/env bash
        tidy() { sleep 0.2; echo "$3 is tidy"; exit 130; }
        trap 'tidy "$@"' TERM
        echo "$3 runs"
        for _ in {1..3000}; do sleep 0.01; done
        """,
    )
    with subprocess.Popen(
        [ROOT / "launch/commands.sh", "first", "second"],
        env={**os.environ, "VENV": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout.readline() == "first runs\n"
        started.send_signal(number)
        assert started.communicate(timeout=60)[0] == "first is tidy\n"
    assert started.returncode == 130
