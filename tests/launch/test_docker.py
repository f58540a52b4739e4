"""launch/docker.sh with real Docker engines: two containers are the nodes of one job.

Each node has an engine of its own, and an image that needs no registry.
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.clusters.emulated import Network
from experiments.records.provenance import ROOT
from tests import programs
from tests.experiments.clusters.engines import Daemons, enter, require, sshd, succeeds
from tests.experiments.clusters.two_nodes import Run, finish
from tests.experiments.waiting import wait_until

pytestmark = pytest.mark.usefixtures("privileged")

#: Files of this repository that a container runs.
_CODE = ("analysis", "baselines", "experiments", "fcdp", "launch", "scripts", "simulation")
_FOLDERS = ("dev", "etc", "opt/fcdp", "proc", "sys", "tmp", "usr")
#: As on a Debian whose programs are all in /usr.
_LINKS = ("bin", "lib", "lib64", "sbin")
_CHANGES = ('ENTRYPOINT ["scripts/entrypoint.sh"]', "WORKDIR /opt/fcdp")
#: Folders of this machine in place of those that an image would bring along.
_MOUNTED = dict.fromkeys(("/usr", sys.base_prefix, sys.prefix))
#: A container's limit of locked memory is at most this process's.
_LOCKED = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]

#: For FCDP_DOCKER_OPTIONS.
OPTIONS = " ".join(
    (
        *(f"--volume {path}:{path}:ro" for path in _MOUNTED),
        f"--env VENV={sys.prefix} --ulimit memlock={_LOCKED}",
    )
)


class Engine:
    def __init__(self, folder: Path) -> None:
        self.variables = {"DOCKER_HOST": f"unix://{folder}/socket"}

    def containers(self) -> list[str]:
        return self._call("ps", "--quiet").split()

    def build(self, image: str, archive: Path) -> None:
        """Make an image of a file system that is in a tar archive."""
        changes = [word for change in _CHANGES for word in ("--change", change)]
        self._call("import", *changes, archive, image)

    def _call(self, *words: str | Path) -> str:
        environment = {"PATH": "/usr/bin:/bin", **self.variables}
        return programs.printed("docker", *words, environment=environment)


@contextmanager
def docker(network: Network, folder: Path) -> Iterator[list[Engine]]:
    """An engine on every node, which has the image ``fcdp``; none outlives the context."""
    archive = folder / "image.tar"
    _pack(archive)
    daemons = Daemons(network, folder)
    with daemons.stack:
        engines = []
        for node in range(len(network.nodes)):
            directory = folder / str(node)
            directory.mkdir()
            engines.append(Engine(directory))
            paths = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
            daemons.inside(
                node,
                # All that it starts ends with it, and it sees no engine of this machine.
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh", "dockerd"),
                *(f"--{option}={directory / name}" for option, name in paths.items()),
                f"--host={engines[-1].variables['DOCKER_HOST']}",
                *("--bridge=none", "--iptables=false", "--ip-forward=false"),
            )
        for engine in engines:
            wait_until(
                lambda engine=engine: succeeds(["docker", "info"], **engine.variables), every_s=0.3
            )
            engine.build("fcdp", archive)
        yield engines


def _pack(archive: Path) -> None:
    """Write a file system with this repository in it, and places for what is mounted."""
    with tarfile.open(archive, "w") as tar:
        for name in _FOLDERS:
            tar.addfile(_entry(name, tarfile.DIRTYPE))
        for name in _LINKS:
            tar.addfile(_entry(name, tarfile.SYMTYPE, f"usr/{name}"))
        for name in _CODE:
            tar.add(ROOT / name, f"opt/fcdp/{name}", filter=_without_caches)


def _entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, 0o1777, target
    return entry


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry


@pytest.fixture(scope="module")
def network(privileged: None) -> Iterator[Network]:
    with Network(2) as built:
        yield built


@pytest.fixture(scope="module")
def engines(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    require("docker.io", "docker", "dockerd", "containerd", "runc")
    with docker(network, tmp_path_factory.mktemp("docker")) as started:
        yield started


@pytest.fixture
def run(network: Network, engines: list[Engine], tmp_path: Path) -> "Iterator[Containers]":
    keys, hidden = tmp_path / "keys", tmp_path / "hidden"
    keys.mkdir()
    hidden.mkdir()
    with sshd(network, keys, hidden, **engines[1].variables) as client:
        yield Containers(tmp_path, network, engines, client)


class Containers:
    """A run of the tests' matrix by launch/docker.sh on the first node."""

    def __init__(self, folder: Path, network: Network, engines: list[Engine], client: Path) -> None:
        self.engines = engines
        self._checkout = folder / "checkout"
        (self._checkout / "runs").mkdir(parents=True)
        (folder / "home/.ssh").mkdir(parents=True)
        shutil.copytree(ROOT / "launch", self._checkout / "launch")
        self.run = Run(self._checkout / "runs", enter(network, 0), {})
        self._hosts = " ".join(network.addresses)
        keys = client.parent
        self._variables = {
            **engines[0].variables,
            "HOME": str(folder / "home"),
            "FCDP_GPUS": "none",
            "FCDP_RANKS_PER_NODE": "1",
            "FCDP_DOCKER_OPTIONS": f"{OPTIONS} --volume {keys}:{keys} "
            f"--env PATH={client}:{os.environ['PATH']}",
        }

    def start(self, steps: int, *more: str) -> subprocess.Popen[str]:
        command = " ".join(self.run.command(steps)).replace(str(self._checkout), "/opt/fcdp")
        return subprocess.Popen(
            [self._checkout / "launch/docker.sh", self._hosts, command, *more],
            env={**os.environ, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check_nothing_runs(self) -> None:
        wait_until(lambda: not any(engine.containers() for engine in self.engines), every_s=0.3)


def test_two_containers_train(run: Containers) -> None:
    started = run.start(steps=2)
    output = finish(started)
    assert started.returncode == 0, output
    run.run.check_record()
    run.check_nothing_runs()


def test_a_signal_ends_the_run_and_all_containers(run: Containers) -> None:
    started = run.start(10**6, "preflight")
    run.run.wait_until_it_trains()
    assert [len(engine.containers()) for engine in run.engines] == [1, 1]
    started.send_signal(signal.SIGTERM)
    output = finish(started, 60)
    assert started.returncode == 130, output
    assert "interrupted: the cluster is torn down" in output
    assert "between nodes" not in output
    run.check_nothing_runs()
