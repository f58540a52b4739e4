"""The wheel: the library alone, with torch and numpy, and what each needs that they do not."""

import os
import re
import shutil
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

#: What a user has before and after the README's lines, on ranks that are nodes of one rank each.
BEFORE = """
import os
import torch, fcdp, plain_loop
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
model = plain_loop.make_model(layers=2, lora_rank=0)
loss = lambda model, batch: model(batch)
batch, is_last = torch.ones(2, plain_loop.LENGTH + 1, dtype=torch.long), True
"""
AFTER = """
before = loss(model, batch)
optimizer.step()
assert fcdp.ledger(model).total("inter_node") > 0
print("learns" if loss(model, batch) < before else "does not learn")
try:
    comm = fcdp.CommOptions(gather_codec=fcdp.Delta())
    fcdp.shard(torch.nn.Linear(8, 8), topology, units=[], comm=comm)
except ValueError as error:
    print("refused" if 'pip install "fcdp[differences]"' in str(error) else error)
torch.distributed.destroy_process_group()
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
    needed = [*map(Requirement, described(wheel).get_all("Requires-Dist", []))]
    extra = {each.name for each in needed if "extra" in str(each.marker)}
    assert {each.name for each in needed} - extra == {"torch", "numpy"}
    assert extra == {"backports.zstd", "numba"}
    assert described(wheel).get_all("Provides-Extra") == ["differences"]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it asks for, and nothing else."""
    return wheels.environment(wheel, tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_an_environment_with_what_it_asks_for_imports_all_of_it(
    python: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    modules = {path.relative_to(ROOT) for path in (ROOT / "fcdp").rglob("*.py")}
    modules -= {path for path in modules if path.parent.name == "integrations"}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in modules}
    printed = programs.printed(python, "-c", IMPORTS, folder=tmp_path, environment=clean)
    assert {*printed.split()} == names - {"fcdp"} | {"fcdp.integrations"}


def launched(python: Path, clean: dict[str, str], program: Path, *arguments: str) -> str:
    """The output of a program on two ranks that torchrun starts far from this checkout."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (python, *torchrun, program, *arguments)
    variables = {"OMP_NUM_THREADS": "1"}
    return programs.printed(*words, folder=program.parent, environment=clean, **variables)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "examples/plain_loop.py", tmp_path))


def test_the_plain_loop_needs_nothing_else(
    python: Path, clean: dict[str, str], example: Path
) -> None:
    output = launched(python, clean, example, "--nodes", "2", "--layers", "2", "--steps", "2")
    assert re.search(r"^between nodes ([\d,]+) bytes, by the closed form \1$", output, re.MULTILINE)


def test_the_lines_of_the_readme_need_nothing_else(
    python: Path, clean: dict[str, str], example: Path
) -> None:
    """Without the line of adapters, which are peft's; and without what only codecs need."""
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    adapted, _, lines = block.partition("\n")
    assert adapted.startswith("model = get_peft_model(")
    program = example.with_name("program.py")
    program.write_text(f"{BEFORE}{lines}{AFTER}")
    printed = launched(python, clean, program)  # both ranks', in any order
    assert (printed.count("learns"), printed.count("refused")) == (2, 2), printed
