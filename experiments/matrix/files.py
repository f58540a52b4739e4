"""The matrix files that come with the repository, and the suites that some of them make up.

A suite is a folder of matrix files; the names of its matrices begin with its own, as in
``paper/volume``.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

MATRICES = Path(__file__).parents[1] / "matrices"


def available() -> list[str]:
    """Names of the matrices."""
    files = MATRICES.rglob("*.yaml")
    return sorted(file.relative_to(MATRICES).with_suffix("").as_posix() for file in files)


def suites() -> list[str]:
    """Names of the suites."""
    return sorted(folder.name for folder in MATRICES.iterdir() if folder.is_dir())


def find(name_or_path: str) -> Path:
    """The file of a matrix given by its name or by a path; ``ValueError`` if there is none."""
    names = available()
    if name_or_path in names:
        return MATRICES / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise ValueError(f"MATRIX: there is no file {name_or_path}")
        return path
    allowed = [*names, *suites()]
    close = get_close_matches(name_or_path, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"MATRIX: unknown matrix {name_or_path!r}; allowed: {', '.join(allowed)}, "
        f"or the path of a file{hint}"
    )


def members(name_or_path: str) -> list[str]:
    """The matrices of a suite; of a matrix, itself."""
    if name_or_path not in suites():
        return [name_or_path]
    return [name for name in available() if name.startswith(f"{name_or_path}/")]
