"""The matrix files that come with the repository, and the suites that some of them make up.

A suite is a folder of matrix files; the names of its matrices begin with its own, as in
``paper/volume``. A folder of the user's own runs as one.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

MATRICES = Path(__file__).parents[1] / "matrices"
_ENDINGS = (".yaml", ".yml")


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
    if path.is_dir():
        raise ValueError(f"MATRIX: {name_or_path} is a folder; give one of its files")
    if path.suffix in _ENDINGS or len(path.parts) > 1 or path.exists():
        if not path.is_file():
            raise ValueError(f"MATRIX: there is no file {name_or_path}")
        if path.suffix not in _ENDINGS:
            raise ValueError(
                f"MATRIX: {name_or_path} is no matrix, which is a file that ends in .yaml"
            )
        return path
    allowed = [*names, *suites()]
    close = get_close_matches(name_or_path, allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"MATRIX: unknown matrix {name_or_path!r}; allowed: {', '.join(allowed)}, "
        f"or the path of a file{hint}"
    )


def members(name_or_path: str) -> list[str]:
    """The matrices of a suite, or of a folder of the user's own; of a matrix, itself.

    Raises ``ValueError`` for a folder without matrix files.
    """
    if name_or_path not in suites():
        folder = Path(name_or_path)
        if name_or_path in available() or not folder.is_dir():
            return [name_or_path]
        found = sorted(str(file) for file in folder.iterdir() if file.suffix in _ENDINGS)
        if not found:
            raise ValueError(f"MATRIX: the folder {name_or_path} holds no file that ends in .yaml")
        return found
    return [name for name in available() if name.startswith(f"{name_or_path}/")]
