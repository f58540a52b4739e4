"""The launch scripts, with stand-ins for ssh, srun and docker that start everything here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import records
from experiments.provenance import ROOT

SKYPILOT = ROOT / "launch/skypilot.yaml"
TOKEN = "marker" * 8
COMMANDS = ["preflight", "run small --resume"]

#: Says with what arguments and settings it was called.
_TELL = """\
#!{python}
import json, os, sys
settings = {{k: v for k, v in os.environ.items() if k.startswith(("FCDP_", "NCCL_"))}}
line = json.dumps({{"name": {name!r}, "arguments": sys.argv[1:], "settings": settings}})
with open({file!r}, "a") as file:
    file.write(line + "\\n")
"""

#: Node 0's commands, whose end is that of every agent, end once all agents have spoken.
_AFTER_THE_AGENTS = """\
import time
deadline = time.monotonic() + 60
while sys.argv[-1] != "node" and time.monotonic() < deadline:
    calls = [json.loads(line) for line in open({file!r})]
    if sum(c["arguments"][-1] == "node" for c in calls) == int(settings["FCDP_NODES"]):
        break
    time.sleep(0.01)
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder for the PATH: ssh and srun that run commands here."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    tell = _TELL.format(python=sys.executable, name="ssh", file=str(tmp_path / "ssh.jsonl"))
    # ssh -o OPTION HOST COMMAND
    _program(folder / "ssh", tell + "os.execvp('bash', ['bash', '-c', sys.argv[-1]])\n")
    _program(
        folder / "srun",
        """\
        #!/usr/bin/env bash
        while [[ $1 == --* ]]; do shift; done
        for ((i = 0; i < SLURM_JOB_NUM_NODES; i++)); do SLURM_NODEID=$i "$@" & done
        wait
        """,
    )
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for the environment's Python, which only says how it was called."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    file = str(tmp_path / "python.jsonl")
    tell = _TELL.format(python=sys.executable, name="python", file=file)
    _program(tmp_path / "venv/bin/python", tell + _AFTER_THE_AGENTS.format(file=file))
    return tmp_path / "venv"


def _program(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)


def start(
    command: list[str | Path], stand_ins: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FCDP_", "NCCL_"))}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "PATH": f"{stand_ins}:{os.environ['PATH']}", **settings},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_calls(tmp_path: Path) -> list[dict[str, Any]]:
    """Both nodes ran their agent, node 0 the commands, all with one token that no argument has."""
    calls = told(tmp_path / "python.jsonl")
    agents = [call for call in calls if call["arguments"] == ["-m", "experiments", "node"]]
    assert sorted(call["settings"]["FCDP_NODE"] for call in agents) == ["0", "1"]
    commands = [call for call in calls if call not in agents]
    assert [" ".join(call["arguments"]) for call in commands] == [
        f"-m experiments {command} --cluster rented" for command in COMMANDS
    ]
    assert {call["settings"]["FCDP_NODE"] for call in commands} == {"0"}
    for name in ("FCDP_HEAD", "FCDP_NODES", "FCDP_TOKEN"):
        assert len({call["settings"][name] for call in calls}) == 1
    settings = calls[0]["settings"]
    assert settings["FCDP_NODES"] == "2"
    assert settings["FCDP_HEAD"].endswith(":29400")
    assert len(settings["FCDP_TOKEN"]) >= 32
    assert settings["FCDP_TOKEN"] not in str([call["arguments"] for call in calls])
    return calls


def test_ssh_starts_every_node_and_shows_the_token_to_nobody(
    tmp_path: Path, stand_ins: Path, python: Path
) -> None:
    done = start(
        [ROOT / "launch/ssh.sh", "node0 node1", *COMMANDS],
        stand_ins,
        VENV=str(python),
        NCCL_DEBUG="WARN",
    )
    assert done.returncode == 0, done.stderr
    calls = check_calls(tmp_path)
    assert {call["settings"]["NCCL_DEBUG"] for call in calls} == {"WARN"}
    assert calls[0]["settings"]["FCDP_HEAD"] == "node0:29400"
    (ssh,) = told(tmp_path / "ssh.jsonl")
    assert ssh["arguments"][-2] == "node1"
    assert calls[0]["settings"]["FCDP_TOKEN"] not in str(ssh["arguments"])


def test_slurm_starts_every_node(tmp_path: Path, stand_ins: Path, python: Path) -> None:
    done = start(
        ["bash", ROOT / "launch/slurm.sbatch", *COMMANDS],
        stand_ins,
        VENV=str(python),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_NUM_NODES="2",
        FCDP_HEAD="10.0.0.1:29400",
    )
    assert done.returncode == 0, done.stderr
    check_calls(tmp_path)


def test_skypilot_starts_every_node(tmp_path: Path, stand_ins: Path, python: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    allowed = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "setup", "run"}
    assert set(task) == allowed
    assert task["secrets"] == {"FCDP_TOKEN": None}

    def start_node(rank: int) -> subprocess.CompletedProcess[str]:
        return start(
            ["bash", "-c", task["run"]],
            stand_ins,
            VENV=str(python),
            FCDP_TOKEN=TOKEN,
            FCDP_COMMANDS="\n".join(COMMANDS) + "\n",
            SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
            SKYPILOT_NUM_NODES="2",
            SKYPILOT_NODE_RANK=str(rank),
        )

    with ThreadPoolExecutor() as executor:
        for done in executor.map(start_node, range(2)):
            assert done.returncode == 0, done.stderr
    calls = check_calls(tmp_path)
    assert calls[0]["settings"]["FCDP_HEAD"] == "10.0.0.1:29400"


def test_docker_gets_the_flags_and_the_settings_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    file = tmp_path / "docker.jsonl"
    tell = _TELL.format(python=sys.executable, name="docker", file=str(file))
    _program(folder / "docker", tell)
    done = start(
        [ROOT / "launch/docker.sh", *COMMANDS],
        folder,
        FCDP_TOKEN=TOKEN,
        FCDP_NODE="0",
        NCCL_DEBUG="WARN",
        FCDP_DOCKER_OPTIONS="--device /dev/infiniband",
    )
    assert done.returncode == 0, done.stderr
    (call,) = told(file)
    line = " ".join(call["arguments"])
    for part in (
        *("--network host", "--ipc host", "--ulimit memlock=-1", "--gpus all"),
        *("--env FCDP_TOKEN", "--env NCCL_DEBUG", "--device /dev/infiniband"),
    ):
        assert part in line
    assert TOKEN not in line
    assert call["arguments"][-4:] == ["fcdp", "launch/node.sh", *COMMANDS]


def test_a_node_that_has_no_use_for_more_commands_stops(tmp_path: Path) -> None:
    """A command that could not run (2) ends the script; a failed cell (1) does not."""
    _program(
        tmp_path / "python",
        """\
        #!/usr/bin/env bash
        echo "$@"
        [[ $3 == first ]] && exit 1
        [[ $3 == second ]] && exit 2
        exit 0
        """,
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "python").rename(tmp_path / "bin/python")
    done = start(
        [ROOT / "launch/node.sh", "first", "second", "third"],
        tmp_path,
        VENV=str(tmp_path),
        FCDP_NODE="0",
    )
    assert done.returncode == 2
    assert "second" in done.stdout
    assert "third" not in done.stdout


def test_cells_train_on_two_nodes_of_this_host(tmp_path: Path, stand_ins: Path) -> None:
    """Everything real but the machines: agents, torchelastic, gloo, training, records."""
    matrix = tmp_path / "tiny.yaml"
    matrix.write_text(_MATRIX)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    output = tmp_path / "run"
    done = start(
        [
            *(ROOT / "launch/ssh.sh", "localhost localhost"),
            f"run {matrix} --no-wandb --output {output}",
        ],
        stand_ins,
        VENV=str(Path(sys.executable).parent.parent),
        FCDP_HEAD=f"127.0.0.1:{port}",
        FCDP_RANKS_PER_NODE="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    by_link = {r.cell.inter_bandwidth_bits_per_s: r for r in records.read(output / "records.jsonl")}
    skipped, trained = by_link[10**7], by_link[None]
    assert skipped.state == "skipped"
    assert "links of rented nodes" in str(skipped.error)
    assert trained.state == "ok"
    assert trained.evidence == "measured"
    cluster = trained.cell.cluster
    assert (cluster.kind, cluster.nodes, cluster.ranks_per_node) == ("rented", 2, 1)
    assert trained.network["counted_interface"] == "lo"
    assert trained.measurement is not None
    assert trained.measurement.inter_node_bytes_per_step > 0
    logs = output / "cells" / trained.cell_id / "logs"
    assert sorted(path.name for path in logs.glob("*")) == [
        *("node0.log", "node1.log", "rank0.log", "rank1.log")
    ]


_MATRIX = """\
name: tiny
description: one cell to train and one to skip
cluster: {nodes: 4, ranks_per_node: 8}
models: [{name: tiny, family: gpt2, layers: 1, width: 16, heads: 1}]
axes:
  inter_bandwidth: [unshaped, 10 Mbit/s]
workload:
  strategy: fcdp
  model: tiny
  tuning: full
  sequence_length: 16
  micro_batch: 1
  accumulation: 1
  dtype: float32
  lora_rank: 4
  learning_rate: 0.001
  warmup_steps: 1
  steps: 2
  timeout_s: 100
"""
