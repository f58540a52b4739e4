"""Rented nodes: those of a Slurm allocation, or machines that ssh reaches."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.clusters import node
from experiments.clusters.interface import ClusterError
from experiments.records.cell import ClusterSpec
from experiments.records.provenance import ROOT

#: Program that a launcher starts on a node.
_PROGRAM = (sys.executable, "-m", node.__name__)
_SCONTROL_S = 60


@dataclass(frozen=True)
class Ssh:
    """Machines that ssh reaches without a question; the first of them is this one.

    Each has this repository, set up, at the same path. ``prefix`` is put before the program on
    all but the first: ``docker run --rm -i …`` where they run it in a container.
    """

    #: The nodes' names, as the launcher knows them; the first has the runner's directory.
    hosts: tuple[str, ...]
    prefix: tuple[str, ...] = ()

    #: A machine that falls silent is given up after 20 s, and so is one that never answers.
    OPTIONS = (
        "BatchMode=yes",
        "ConnectTimeout=20",
        "ServerAliveInterval=5",
        "ServerAliveCountMax=4",
        # Not over a connection that another command keeps and may end.
        "ControlPath=none",
    )

    def command(self, node: int) -> list[str]:
        """The command that starts ``experiments.clusters.node`` on a node and lasts as long."""
        if node == 0:
            return list(_PROGRAM)
        program = shlex.join((*self.prefix, *_PROGRAM))
        if not self.prefix:
            program = f"cd {shlex.quote(str(ROOT))} && exec {program}"
        options = [word for option in self.OPTIONS for word in ("-o", option)]
        return ["ssh", "-a", "-x", "-T", *options, "--", self.hosts[node], program]

    def head(self) -> str:
        """The name or address by which the other nodes reach the first."""
        # The user's name is for ssh alone.
        return self.hosts[0].rpartition("@")[2]


@dataclass(frozen=True)
class Srun:
    """The nodes of a Slurm allocation, which see this repository at the same path."""

    hosts: tuple[str, ...]

    def command(self, node: int) -> list[str]:
        return [
            "srun",
            f"--nodelist={self.hosts[node]}",
            *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
            # All cores for the ranks, which bind themselves if they want to.
            "--cpu-bind=none",
            # A step that an interactive shell runs in has the node's resources already.
            "--overlap",
            "--kill-on-bad-exit=1",
            "--mpi=none",
            f"--chdir={ROOT}",
            *_PROGRAM,
        ]

    def head(self) -> str:
        # Slurm's daemons use this address; the node's name may be 127.0.1.1 on the node itself.
        described = _scontrol("show", "node", self.hosts[0], "--oneliner")
        match = re.search(r"\bNodeAddr=(\S+)", described)
        return match[1] if match else self.hosts[0]


#: A way to start a program on a node, joined to this process by its standard streams.
Launcher = Ssh | Srun


@dataclass(frozen=True)
class Allocation:
    """Rented nodes, by ``FCDP_HOSTS`` or Slurm's variables, and ``FCDP_RANKS_PER_NODE``."""

    launcher: Launcher
    ranks_per_node: int
    #: ``FCDP_HEAD``: the first node's address on the network between nodes.
    head: str | None = None

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> Allocation:
        """Read the allocation from environment variables.

        Raises ``ClusterError`` naming the variable that is missing or not allowed.
        """
        launcher = _launcher(environment)
        text = environment.get("FCDP_RANKS_PER_NODE") or f"{visible_gpus(environment) or ''}"
        if not text.isdecimal() or int(text) < 1:
            problem = f" = {text!r}" if text else " is not set and this machine shows no GPU"
            raise ClusterError(f"FCDP_RANKS_PER_NODE{problem}: allowed are whole numbers from 1")
        return cls(launcher, int(text), environment.get("FCDP_HEAD") or None)

    @property
    def spec(self) -> ClusterSpec:
        """The cluster that a matrix runs on here, whatever its file names."""
        nodes = len(self.launcher.hosts)
        return ClusterSpec(kind="rented", nodes=nodes, ranks_per_node=self.ranks_per_node)

    def head_address(self) -> str:
        """An IPv4 address of the first node. Raises ``ClusterError`` if others cannot reach it."""
        name = self.head or self.launcher.head()
        try:
            address = socket.gethostbyname(name)
        except (OSError, UnicodeError) as error:
            raise ClusterError(
                f"{name}: no address of the first node: {getattr(error, 'strerror', error)}; set "
                "FCDP_HEAD to its address on the network between nodes"
            ) from error
        others = set(self.launcher.hosts[1:]) - {self.launcher.hosts[0]}
        if others and not self.head and address.startswith("127."):
            raise ClusterError(
                f"{name} is {address} here, which other nodes cannot reach; set FCDP_HEAD to the "
                "first node's address on the network between nodes"
            )
        return address


def _launcher(environment: Mapping[str, str]) -> Launcher:
    if hosts := environment.get("FCDP_HOSTS", "").replace(",", " ").split():
        prefix = environment.get("FCDP_PREFIX", "")
        try:
            return Ssh(tuple(hosts), tuple(shlex.split(prefix)))
        except ValueError as error:
            raise ClusterError(
                f"FCDP_PREFIX = {prefix!r}: {error}; must be words as a shell reads them"
            ) from error
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if environment.get("SLURM_JOB_ID") and nodes:
        return Srun(tuple(_scontrol("show", "hostnames", nodes).split()))
    raise ClusterError(
        "no rented nodes: set FCDP_HOSTS to the machines that ssh reaches, this one first "
        '("10.0.0.1 10.0.0.2"), or call this in a Slurm allocation'
    )


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise ClusterError(f"scontrol {' '.join(arguments)}: {message.strip()}") from error
    return done.stdout


def port(environment: Mapping[str, str], otherwise: int) -> int:
    """The port at which the ranks meet: ``FCDP_PORT``, or the matrix's, ``otherwise``."""
    text = environment.get("FCDP_PORT", "")
    if text and not (text.isdecimal() and 1024 <= int(text) <= 65535):
        raise ClusterError(f"FCDP_PORT = {text!r}: allowed are whole numbers from 1024 to 65535")
    return int(text) if text else otherwise


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Number of GPUs that a rank would see, by the driver's files: CUDA must not start here."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
    return len([path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
