"""constraints.txt pins everything that pyproject.toml leads to, for every Python it allows."""

import os
import re
import sys
from importlib import metadata
from typing import Any

import pytest

from baselines import pins
from tests.programs import ROOT

pytest.importorskip("packaging", reason="not in an environment made by `make setup`")
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
GROUPS: dict[str, list[Any]] = PYPROJECT["dependency-groups"]
ALL = GROUPS.pop("all")
#: Groups that `make` does not install: users add them to their environments.
OWN = {
    name: {Requirement(line).name for line in GROUPS.pop(name)} for name in ("images", "quantised")
}
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LISTED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *EXTRAS.values(), *GROUPS.values())
    for line in lines
]
PYTHONS = ["3.10.12", "3.11.2", "3.12.3", "3.13.5", "3.14.0"]


def environment(python: str, machine: str = "x86_64") -> dict[str, str]:
    return {
        **default_environment(),
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
    }


def holds(requirement: Requirement, env: dict[str, str], extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**env, "extra": extra})


def pins_for(env: dict[str, str]) -> dict[str, Version]:
    """The pin of each package; two that hold at once would be an error of pip's."""
    pinned: dict[str, Version] = {}
    for pin in (pin for pin in PINS if holds(pin, env)):
        name = canonicalize_name(pin.name)
        assert name not in pinned, f"{name} is pinned twice for Python {env['python_version']}"
        pinned[name] = Version(str(pin.specifier).removeprefix("=="))
    return pinned


def test_every_pin_is_exact() -> None:
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in PINS)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_a_pin_that_satisfies_it(python: str, machine: str) -> None:
    env = environment(python, machine)
    pinned = pins_for(env)
    for requirement in LISTED:
        if holds(requirement, env):
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
    assert {"pip", "setuptools", "wheel"} <= pinned.keys()


def test_what_is_required_indirectly_is_pinned_and_installed_so() -> None:
    """Follows the requirements of what is installed here to the end."""
    env = {key: str(value) for key, value in default_environment().items()}
    pinned = pins_for(env)
    queue = [requirement for requirement in LISTED if holds(requirement, env)]
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not in this environment: `make setup` did not make it")
        assert name in pinned, f"{name} is not pinned"
        assert Version(Version(installed.version).public) == pinned[name]
        for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            needed = map(Requirement, installed.requires or [])
            queue += [other for other in needed if holds(other, env, extra)]


def test_the_papers_deepspeed_finds_what_it_needs_among_the_pins() -> None:
    """Its environment shares all packages but itself."""
    if pins.version("paper") is None:
        pytest.skip(f"the paper's DeepSpeed is not installed: {pins.COMMANDS['paper']}")
    path = pins.variables("paper")["PYTHONPATH"].partition(os.pathsep)[0]
    installed = {canonicalize_name(each.name): each for each in metadata.distributions(path=[path])}
    (paper,) = (ROOT / "constraints-paper.txt").read_text().splitlines()[1:]
    assert installed.keys() == {"deepspeed"}
    assert f"deepspeed=={installed['deepspeed'].version}" == paper
    env = {key: str(value) for key, value in default_environment().items()}
    pinned = pins_for(env)
    for needed in map(Requirement, installed["deepspeed"].requires or []):
        if holds(needed, env):
            assert pinned[canonicalize_name(needed.name)] in needed.specifier


def test_the_group_all_has_every_other() -> None:
    assert [{"include-group": name} for name in GROUPS] == ALL


def test_a_group_of_users_own_is_no_part_of_all() -> None:
    quantised = {"bitsandbytes", "torchao"}
    assert {"images": {"scikit-learn", "torchvision"}, "quantised": quantised} == OWN
    assert not {name for names in OWN.values() for name in names} & {pin.name for pin in PINS}
