"""The right to make network namespaces: root's, or that of a user namespace."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.clusters.interface import ClusterError

#: Numbers of the capabilities in the kernel's bit mask.
_NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}

#: Kernel settings that forbid user namespaces, and the value that does.
_FORBIDDING = {
    "user.max_user_namespaces": "0",
    "kernel.unprivileged_userns_clone": "0",
    "kernel.apparmor_restrict_unprivileged_userns": "1",
}

#: Named namespaces live in /run/netns, which only the host's root may write to: a tmpfs that only
#: this process tree sees takes its place, or that of the whole /run where there is no such folder.
_MOUNT = 'if [ -d /run/netns ]; then at=/run/netns; else at=/run; fi; mount -t tmpfs fcdp "$at"'


def missing_capabilities() -> list[str]:
    """The capabilities that this process needs to make network namespaces and does not have."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (mask,) = (int(line.split()[1], base=16) for line in lines if line.startswith("CapEff:"))
    return [name for name, bit in _NEEDED.items() if not mask >> bit & 1]


def require() -> None:
    """Raise ``ClusterError`` if this process may not make network namespaces."""
    missing = missing_capabilities()
    if missing:
        raise ClusterError(
            f"an emulated cluster needs {' and '.join(missing)}: run as root, or call "
            "enter_user_namespace_if_needed() before anything else"
        )


def enter_user_namespace_if_needed() -> None:
    """Execute the running command again as root of a user namespace, unless it is privileged.

    A command calls it first: everything before runs twice. The network stays the host's:
    only the cluster's own namespaces are new. Raises ``ClusterError`` with what forbids it and
    what to do instead where user namespaces cannot be had.
    """
    missing = missing_capabilities()
    if not missing:
        return
    unshare = shutil.which("unshare")
    if unshare is None:
        raise ClusterError(
            f"{' and '.join(missing)} missing, and no `unshare` (util-linux) to get them in a "
            "user namespace: install util-linux, or run as root"
        )
    enter = [unshare, "--user", "--map-root-user", "--mount", "sh", "-ec"]
    tried = subprocess.run([*enter, _MOUNT], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise ClusterError(_explain(missing, tried.stderr.strip()))
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execv(unshare, [*enter, f'{_MOUNT}; exec "$@"', "sh", *command])


def _explain(missing: list[str], refusal: str) -> str:
    settings = [name for name, value in _FORBIDDING.items() if _setting(name) == value]
    if settings:
        because = f"forbidden by {' and '.join(f'{name} = {_setting(name)}' for name in settings)}"
    else:
        because = "most likely forbidden by the container's seccomp or AppArmor profile"
    return (
        f"an emulated cluster needs {' and '.join(missing)}, which this process lacks, and a user "
        f"namespace, which would give them, is {because} ({refusal}). Run as root; in a container "
        "started with `--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt apparmor=unconfined` "
        "or `--privileged`; or have the administrator allow user namespaces"
    )


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None
