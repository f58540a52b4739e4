import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

from experiments.clusters.interface import ClusterError
from experiments.clusters.privileges import (
    enter_user_namespace_if_needed,
    missing_capabilities,
    require,
)
from tests import programs
from tests.experiments.waiting import is_running

USER = 1000
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
WITHOUT_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'


@pytest.fixture(scope="module")
def as_user() -> list[str]:
    """What to put before the arguments of Python, so that it runs without privileges."""
    if missing_capabilities():
        return [sys.executable]
    # The interpreter of a virtual environment may lie in root's home.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    system = shutil.which(version, path="/usr/bin:/usr/local/bin")
    path = os.pathsep.join(each for each in sys.path if each)
    for python in filter(None, (sys.executable, system)):
        command = [*AS_USER, "env", f"PYTHONPATH={path}", python]
        if programs.ended(*command, "-c", "import torch, pyroute2").returncode == 0:
            return command
    pytest.skip(f"user {USER} cannot run this Python with its packages")


@pytest.fixture
def logs() -> Iterator[Path]:
    """A folder that an unprivileged user may write to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@pytest.mark.system
def test_a_user_runs_a_cluster_in_a_user_namespace(as_user: list[str], logs: Path) -> None:
    before = netns.listnetns()
    command = [*as_user, "-m", "tests.experiments.clusters.unprivileged", str(logs), "a b", "$c"]
    done = programs.ended(*command, within_s=120)
    if "ClusterError" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "['a b', '$c'] 100000000 Outcome(state='ok'" in done.stdout
    # Others that test at the same time have theirs.
    left = {*netns.listnetns()} - {*before}
    assert not [name for name in left if not is_running(int(name.split("-")[2]))]


def test_where_user_namespaces_are_forbidden_it_says_what_to_do(
    as_user: list[str], logs: Path
) -> None:
    # Inside a user namespace that allows no further ones, and without its root's capabilities.
    outer = [*as_user, "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"]
    forbidden = ["unshare", "--user", "--map-root-user", "sh", "-ec", FORBID, "sh"]
    inner = [*WITHOUT_CAPABILITIES, as_user[-1], "-m", "tests.experiments.clusters.unprivileged"]
    done = programs.ended(*outer, *forbidden, *inner, logs)
    if "ClusterError" not in done.stderr and "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr}")
    assert done.returncode == 1
    for part in (
        "CAP_NET_ADMIN and CAP_SYS_ADMIN",
        "forbidden by user.max_user_namespaces = 0",
        "--cap-add SYS_ADMIN --cap-add NET_ADMIN",
        "--privileged",
    ):
        assert part in done.stderr


def test_without_privileges_and_unshare_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Stands in for a machine without util-linux.
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        "experiments.clusters.privileges.missing_capabilities", lambda: ["CAP_SYS_ADMIN"]
    )
    with pytest.raises(ClusterError, match="an emulated cluster needs CAP_SYS_ADMIN: run as root"):
        require()
    with pytest.raises(ClusterError, match="install util-linux"):
        enter_user_namespace_if_needed()
