"""A real Docker engine on each node of a network, and an image that needs no registry."""

import resource
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.clusters.emulated import Network
from experiments.records.provenance import ROOT
from tests import programs
from tests.experiments.clusters.engines import Daemons, succeeds
from tests.experiments.waiting import wait_until

#: What of this repository a container runs.
_CODE = ("analysis", "baselines", "experiments", "fcdp", "launch", "scripts", "simulation")
_FOLDERS = ("dev", "etc", "opt/fcdp", "proc", "sys", "tmp", "usr")
#: As on a Debian whose programs are all in /usr.
_LINKS = ("bin", "lib", "lib64", "sbin")
_CHANGES = ('ENTRYPOINT ["scripts/entrypoint.sh"]', "WORKDIR /opt/fcdp")
#: What an image would bring along is this machine's own.
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
            own = folder / str(node)
            own.mkdir()
            engines.append(Engine(own))
            paths = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
            daemons.inside(
                node,
                # All that it starts ends with it, and it sees no engine of this machine.
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", 'mount -t tmpfs none /run && exec "$@"', "sh", "dockerd"),
                *(f"--{option}={own / name}" for option, name in paths.items()),
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
