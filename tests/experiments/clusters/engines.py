"""Real sshd and real Slurm on this machine: network namespaces are the nodes."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from experiments.clusters.emulated import Network
from experiments.records.provenance import ROOT
from tests import programs
from tests.experiments.waiting import wait_until

_SBIN = ("/usr/sbin", "/sbin")


def require(package: str, *names: str) -> None:
    """Skip the test where one of the package's programs is missing."""
    path = os.pathsep.join([os.environ["PATH"], *_SBIN])
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install {package}")


class Daemons:
    """Processes that end with the context, in namespaces of a network."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.stack = ExitStack()

    def inside(self, node: int, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on a node that has a host name of its own; its output is in a log."""
        script = 'hostname "$0" && exec "$@"'
        log = (self.folder / f"{Path(command[0]).name}-{node}.log").open("ab")
        with log:
            process = subprocess.Popen(
                [
                    *enter(self.network, node),
                    *("unshare", "--uts", "--mount", "sh", "-c", script, f"n{node}", *command),
                ],
                env={**os.environ, "PATH": os.pathsep.join([os.environ["PATH"], *_SBIN])}
                | variables,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.stack.callback(end, process)
        return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def sshd(network: Network, folder: Path, hidden: Path, **variables: str) -> Iterator[Path]:
    """An ssh server on every node but the first; yields a folder for the PATH with its client.

    ``hidden``, the folder of a run, is empty there: as on machines without a common file system.
    Who logs in has ``variables``.
    """
    require("openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")
    for key in ("host", "user"):
        programs.printed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
    Path("/run/sshd").mkdir(exist_ok=True)
    client = folder / "bin"
    client.mkdir()
    options = (
        f"IdentityFile={folder}/user",
        "IdentitiesOnly=yes",
        "StrictHostKeyChecking=accept-new",
        f"UserKnownHostsFile={folder}/known",
        "LogLevel=ERROR",
    )
    words = " ".join(f"-o {option}" for option in options)
    programs.written(client / "ssh", f'exec {shutil.which("ssh")} -F none {words} "$@"')
    daemons = Daemons(network, folder)
    with daemons.stack:
        for node, address in list(enumerate(network.addresses))[1:]:
            settings = (
                *(f"ListenAddress={address}", f"HostKey={folder}/host", "UsePAM=no"),
                *(f"AuthorizedKeysFile={folder}/user.pub", "StrictModes=no", "PidFile=none"),
                *(f"SetEnv={name}={value}" for name, value in variables.items()),
            )
            options = tuple(word for setting in settings for word in ("-o", setting))
            daemons.inside(
                node,
                *("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)),
                *("/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *options),
            )
            login = [*enter(network, 0), str(client / "ssh"), address, "true"]
            wait_until(lambda login=login: succeeds(login), every_s=0.1)
        yield client


def enter(network: Network, node: int) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{network.nodes[node]}"]


def succeeds(command: Sequence[str], **variables: str) -> bool:
    return programs.ended(*command, **variables).returncode == 0


class Slurm:
    """A Slurm of as many nodes as the network has: n0, n1 …"""

    def __init__(self, daemons: Daemons, conf: Path) -> None:
        self._daemons = daemons
        self.variables = {"SLURM_CONF": str(conf)}
        self.slurmd: list[subprocess.Popen[bytes]] = []

    def start(self, node: int) -> subprocess.Popen[bytes]:
        return self._daemons.inside(node, "slurmd", "-D", "-N", f"n{node}", **self.variables)

    def command(self, *words: str) -> list[str]:
        return [*enter(self._daemons.network, 0), *words]

    def call(self, *words: str) -> str:
        """Call one of Slurm's commands on the first node; return what it prints."""
        return programs.printed(*self.command(*words), **self.variables)

    def wait_until_idle(self) -> None:
        idle = ["idle"] * len(self._daemons.network.nodes)
        look = ("sinfo", "--noheader", "--Node", "--format=%T")
        wait_until(lambda: self.call(*look).split() == idle, every_s=0.3)

    def wait_until_ended(self, job: str, within_s: float = 280) -> str:
        """Wait until a job has ended; return its state."""
        look = ("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T")
        active = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}
        wait_until(lambda: self.call(*look).strip() not in active, within_s, every_s=0.3)
        return self.call(*look).strip()


@contextmanager
def slurm(network: Network, folder: Path) -> Iterator[Slurm]:
    """A controller on the first node and a daemon on each, with one partition of all nodes."""
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    nodes = "\n".join(
        f"NodeName=n{node} NodeHostname=n{node} NodeAddr={address} CPUs=2 State=UNKNOWN"
        for node, address in enumerate(network.addresses)
    )
    conf = folder / "slurm.conf"
    settings = Path(__file__).with_name("slurm.conf").read_text()
    conf.write_text(settings.format(folder=folder, head=network.addresses[0], nodes=nodes))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    daemons = Daemons(network, folder)
    with daemons.stack:
        names = {f"{name}-file": name for name in ("key", "pid", "log", "seed")}
        files = [f"--{key}={folder}/{name}" for key, name in {**names, "socket": "socket"}.items()]
        daemons.inside(0, "munged", "--foreground", "--force", *files)
        wait_until((folder / "socket").exists)
        started = Slurm(daemons, conf)
        daemons.inside(0, "slurmctld", "-D", **started.variables)
        for node in range(len(network.nodes)):
            started.slurmd.append(started.start(node))
        ping = started.command("scontrol", "ping")
        wait_until(lambda: succeeds(ping, **started.variables), every_s=0.3)
        started.wait_until_idle()
        yield started
