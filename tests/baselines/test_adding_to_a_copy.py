"""A strategy added to a copy of the tree, by one file, one entry and a setting of its own."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.docs import ROOT, block
from tests.experiments.stand_in import matrix_file

PARTS = ("fcdp", "baselines", "simulation", "experiments", "analysis")
SETTINGS = """

class PatienceSettings(Settings):
    patience: Annotated[int, Setting("Patience", "subject", in_id="later")] = 1
"""
#: Calls each command line of its arguments, and prints their outputs as a list.
CALLS = """
import json, sys
from typer.testing import CliRunner
import analysis.__main__, experiments.__main__

apps = {"analysis": analysis.__main__.app, "experiments": experiments.__main__.app}
outputs = []
for line in sys.argv[1:]:
    program, *words = line.split()
    result = CliRunner().invoke(apps[program], words)
    assert result.exit_code == 0, result.output
    outputs.append(result.stdout)
print(json.dumps(outputs))
"""
PLAN = "plan --model gpt-10b --nodes 4 --gpus 8 --gpu a40 --inter-node 10Gbit/s --host-memory 512GB"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    # The planner's rates of GPUs are a record.
    shutil.copytree(ROOT / "results" / "compute", folder / "results" / "compute")
    (folder / "baselines" / "fcdp_disk.py").write_text(block("extend.md", "strategy"))
    registry = folder / "baselines" / "registry.py"
    before, start, after = registry.read_text().partition("STRATEGIES: tuple[Strategy, ...] = (\n")
    entry = (
        block("extend.md", "registry").strip().removesuffix(")") + ", settings=PatienceSettings)"
    )
    imported = before.replace("    CacheSettings,\n", "    CacheSettings,\n    PatienceSettings,\n")
    registry.write_text(f"{imported}{start}    {entry},\n{after}")
    with (folder / "baselines" / "settings.py").open("a") as file:
        file.write(SETTINGS)
    more = {"strategies": "fsdp2, fcdp-disk", "links": "100 Mbit/s", "timeout_s": 120}
    matrix_file(folder, "reference: fsdp2\n", **more).rename(folder / "added.yaml")
    return folder


@pytest.mark.drawn
@pytest.mark.usefixtures("privileged")
def test_it_is_listed_run_compared_audited_drawn_planned_and_simulated(copy: Path) -> None:
    simulated = "run added.yaml --cluster simulated --output runs/simulated"
    lines = (
        "experiments strategies",
        "experiments run added.yaml --set patience=[1,2] --output runs/added",
        "analysis audit runs/added",
        "analysis table runs/added",
        "analysis report runs/added --output page",
        f"experiments {PLAN} --strategies fcdp-disk",
        f"experiments {simulated}",
    )
    here = {"PYTHONPATH": str(copy), "COLUMNS": "200"}
    words = (sys.executable, "-c", CALLS, *lines)
    printed = programs.printed(*words, folder=copy, within_s=240, **here).splitlines()[-1]
    listed, ran, audited, table, _, planned, predicted = json.loads(printed)
    assert "3/3 ok      fcdp-disk 2" in ran
    assert "losses   3 of 3 cells reach fsdp2's" in ran
    row = next(line for line in audited.splitlines() if "fcdp-disk" in line)
    assert "fair" in row or "ok" in row, audited
    assert any("fcdp-disk" in page.read_text() for page in copy.glob("page/**/*.html"))
    for output in (listed, table, planned, predicted):
        assert "fcdp-disk" in output
