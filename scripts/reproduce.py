"""Run every matrix with committed records again, and resume what was ended.

    python -m scripts.reproduce [MATRIX ...]

It first prints how long that takes. Records are copied into results as matrices end.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.matrix import files as matrices
from experiments.records.record import read
from experiments.records.select import FILE
from simulation import files, yaml_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
#: Matrices that are named by their files, and the script that trains their first weights.
EXAMPLES = ROOT / "examples" / "differences"
PRETRAINED, PRETRAIN = EXAMPLES / "weights", "examples.differences.pretrain"


def committed() -> dict[str, Path]:
    paths = files.below(RESULTS, FILE)
    return {path.parent.relative_to(RESULTS).as_posix(): path for path in paths}


def argument(name: str) -> str:
    """The matrix for ``experiments run``: its name, or its file.

    Raises ``ValueError`` for an unknown name.
    """
    if name in matrices.available():
        return name
    for file in EXAMPLES.glob("*.yaml"):
        if yaml_lines.load(file).values["name"] == name:
            return file.relative_to(ROOT).as_posix()
    raise ValueError(f"matrix = {name!r}: allowed are {', '.join(committed())}")


def minutes(name: str) -> float:
    """Minutes that the committed run took."""
    path = committed().get(name)
    return 0.0 if path is None else sum(record.seconds for record in read(path)) / 60


def reproduce(names: Sequence[str]) -> int:
    """Run matrices and copy their records; return the status of the first that was ended."""
    took = {name: minutes(name) for name in names}
    print("\n".join(f"{took[name]:7.1f} min  {argument(name)}" for name in names))
    print(f"{sum(took.values()):7.1f} min  by the committed records; what has run is kept")
    for name in names:
        matrix = argument(name)
        if matrix != name and not PRETRAINED.exists():
            _run(PRETRAIN)
        status = _run("experiments", "run", matrix, "--resume")
        if status not in (0, 1):  # a cell that fails is a result too
            return status
        (RESULTS / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "runs" / name / FILE, RESULTS / name / FILE)
    return 0


def _run(*module: str) -> int:
    return subprocess.run([sys.executable, "-m", *module], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(reproduce(sys.argv[1:] or [*committed()]))
