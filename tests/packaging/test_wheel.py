"""The wheel: the library alone, with torch, a checksum and a codec of bytes."""

import os
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests import wheels
from tests.programs import ROOT

pytest.importorskip("packaging", reason="not in an environment made by `make setup`")
from packaging.requirements import Requirement

from tests import programs

#: Imports every module of the library but the integrations with other people's trainers, without
#: the packages beside it.
IMPORTS = """
import importlib.util, pkgutil, sys
import fcdp
for module in pkgutil.walk_packages(fcdp.__path__, "fcdp."):
    if module.name.startswith("fcdp.integrations."):
        continue
    importlib.import_module(module.name)
    print(module.name)
for beside in ("baselines", "simulation", "experiments", "analysis"):
    assert importlib.util.find_spec(beside) is None, beside
assert fcdp.__file__.startswith(sys.prefix), fcdp.__file__
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.source(tmp_path_factory.mktemp("source"), "fcdp", "baselines", "tests")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.built("build_wheel", source, tmp_path_factory.mktemp("wheels"))


def test_an_editable_install_finds_the_parts_beside_the_library(
    source: Path, tmp_path: Path
) -> None:
    """By the path of the checkout, so that a part that is added later is found as well."""
    with zipfile.ZipFile(wheels.built("build_editable", source, tmp_path)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(name).decode().strip() == str(source)


def described(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_it_has_every_file_of_the_library_and_no_other(wheel: Path) -> None:
    files = [path for path in (ROOT / "fcdp").rglob("*") if path.is_file()]
    files = [path for path in files if path.parent.name != "__pycache__"]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    contents = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert contents == expected


def test_it_asks_for_little(wheel: Path) -> None:
    needed = map(Requirement, described(wheel).get_all("Requires-Dist", []))
    little = {"torch", "xxhash", "backports.zstd", "numba", "numpy"}
    assert {each.name for each in needed} == little
    assert described(wheel).get_all("Provides-Extra") is None


def test_an_environment_with_what_it_asks_for_imports_all_of_it(
    wheel: Path, tmp_path: Path
) -> None:
    python = wheels.environment(wheel, tmp_path)
    modules = {path.relative_to(ROOT) for path in (ROOT / "fcdp").rglob("*.py")}
    modules -= {path for path in modules if path.parent.name == "integrations"}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in modules}
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = programs.printed(python, "-c", IMPORTS, folder=tmp_path, environment=clean)
    assert {*printed.split()} == names - {"fcdp"} | {"fcdp.integrations"}
