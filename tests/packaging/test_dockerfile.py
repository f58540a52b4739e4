"""The Dockerfile, as far as it can be tested without a container engine."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.main import get_group

from analysis.__main__ import app
from experiments.commands import COMMANDS
from tests import programs
from tests.programs import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, argument) pairs, with comments dropped and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(argument.split())) for name, argument in pairs]


def arguments(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def test_the_linter_has_no_complaint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not in this environment: `make setup` did not make it")
    programs.printed(hadolint, "--no-color", DOCKERFILE)


def test_every_system_package_that_the_set_up_asks_for_is_installed(tmp_path: Path) -> None:
    """Asked on a PATH with no Python, compiler or make, the script names all of them."""
    for tool in ("cat", "dirname", "flock", "id", "mktemp", "rm", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    script = (shutil.which("bash") or "bash", ROOT / "scripts/setup.sh", "--check")
    done = programs.ended(*script, environment={"PATH": str(tmp_path)})
    named = re.search(r"apt-get install (.*)", done.stderr)
    assert named, done.stderr
    (installed,) = re.findall(r"--no-install-recommends (.*?) &&", " ".join(arguments("RUN")))
    assert {"python3-venv", "g++"} <= set(named[1].split()) <= set(installed.split())


def test_the_default_base_has_the_cuda_of_torch() -> None:
    (base,) = [a.removeprefix("BASE=") for a in arguments("ARG") if a.startswith("BASE=")]
    (cuda,) = re.findall(r"^nvidia-cuda-runtime==(\d+\.\d+)\.", constraints(), re.MULTILINE)
    assert re.fullmatch(rf"nvidia/cuda:{re.escape(cuda)}\.\d+-devel-ubuntu[\d.]+", base)
    (torch,) = re.findall(r"^torch==(\d+\.\d+)", constraints(), re.MULTILINE)
    assert f"{cuda} for PyPI's torch {torch}" in DOCKERFILE.read_text()


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("torch", ["cuda", "cpu"])
def test_its_set_up_step_runs_on_what_was_copied(tmp_path: Path, torch: str) -> None:
    """The step itself, with nothing installed: the script only says what it would do."""
    for copied in arguments("COPY")[:-1]:
        *sources, target = copied.split()[1:]
        (tmp_path / target).mkdir(exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, tmp_path / target)
    (step,) = [run for run in arguments("RUN") if "scripts/setup.sh" in run]
    assert ("ARG", "TORCH=cuda") in instructions()
    checked = step.replace("setup.sh --pins", "setup.sh --check")
    folders = {"VENV": "venv", "TORCH_EXTENSIONS_DIR": "venv/operators"}
    variables = {name: str(tmp_path / place) for name, place in folders.items()}
    printed = programs.printed("bash", "-c", checked, folder=tmp_path, TORCH=torch, **variables)
    assert f"torch's {torch} build" in printed
    assert (tmp_path / "fcdp/__init__.py").exists()
    for folder in operators():
        assert (tmp_path / folder.relative_to("/opt")).stat().st_mode & 0o7777 == 0o1777


def operators() -> list[Path]:
    """Where a container compiles DeepSpeed's operators: both pins', whatever account it runs as."""
    (variables,) = (argument.split() for argument in arguments("ENV") if "VENV=" in argument)
    assert "VENV=/opt/venv" in variables
    assert "TORCH_EXTENSIONS_DIR=/opt/venv/operators" in variables
    return [Path("/opt/venv/operators"), Path("/opt/venv-paper/operators")]


def test_nothing_that_git_knows_is_left_out() -> None:
    """A tracked file that is missing in the image would make its commit look changed."""

    def patterns(name: str) -> set[str]:
        lines = (ROOT / name).read_text().splitlines()
        return {line.removeprefix("**/").rstrip("/") for line in lines if line[:1] not in ("", "#")}

    of_git = {each for each in patterns(".dockerignore") if each.removeprefix("!")[:5] == ".git/"}
    assert patterns(".dockerignore") - of_git <= patterns(".gitignore")


def test_the_image_knows_its_commit_and_no_credentials(tmp_path: Path) -> None:
    """A copy of a repository with what .dockerignore lets through, in place of the image."""
    repository, image = tmp_path / "repository", tmp_path / "image"

    def git(directory: Path, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return programs.printed("git", "-C", directory, *identity, *arguments)

    repository.mkdir()
    git(repository, "init")
    (repository / "file").write_text("text")
    git(repository, "add", "file")
    git(repository, "commit", "--message", "first")
    git(repository, "gc")
    git(repository, "remote", "add", "origin", "https://token@example.org/")
    for name in ("FETCH_HEAD", "credentials", "hooks/pre-push", "logs/HEAD"):
        secret = repository / ".git" / name
        secret.parent.mkdir(exist_ok=True)
        secret.write_text("https://token@example.org/")
    (image / ".git").mkdir(parents=True)
    shutil.copy(repository / "file", image)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    globs = [line.removeprefix("!") for line in lines[lines.index(".git/*") :] if line[:1] == "!"]
    for path in (match for glob in globs for match in repository.glob(glob)):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, image / path.relative_to(repository))
    assert git(image, "rev-parse", "HEAD") == git(repository, "rev-parse", "HEAD")
    assert git(image, "status", "--porcelain") == ""
    (image / "file").write_text("another text")
    assert git(image, "status", "--porcelain") == " M file\n"
    texts = [path.read_bytes() for path in image.rglob("*") if path.is_file()]
    assert not any(b"token" in text for text in texts)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["run", "quickstart"], "python -m experiments run quickstart"),
        (["--help"], "python -m experiments --help"),
        (["torchrun", "--nnodes", "2"], "torchrun --nnodes 2"),
        *(([name, "runs"], f"python -m experiments {name} runs") for name in COMMANDS),
        *(([name, "runs"], f"python -m analysis {name} runs") for name in get_group(app).commands),
    ],
)
def test_the_entry_point_reaches_the_commands(
    tmp_path: Path, command: list[str], expected: str
) -> None:
    (entrypoint,) = arguments("ENTRYPOINT")
    script = ROOT / entrypoint.strip('[]"')
    assert os.access(script, os.X_OK)
    for program in ("python", "torchrun"):
        programs.written(tmp_path / program, f'echo {program} "$@"')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert programs.printed(script, *command, environment=environment).strip() == expected
