"""Run the library's tests on the torch of this environment, and keep their counts.

    python -m scripts.versions 2.15.0            all suites: results/versions/2.15.0.jsonl
    python -m scripts.versions 2.15.0 --short    what make test runs of them, and nothing is kept
    python -m scripts.versions                   results/versions/table.md alone, from all files

``make versions`` calls it in an environment of each release. It fails where a test fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "versions"
#: Files of tests by suite; a file belongs to the suite that names it most exactly.
SUITES = {
    "upstream": ("tests/fcdp/upstream",),
    "mixed precision": ("tests/fcdp/upstream/test_mixed_precision.py",),
    "accumulation": ("tests/fcdp/test_accumulate.py", "tests/fcdp/test_reduce_scatter.py"),
    "semantics": (
        "tests/fcdp/test_api.py",
        "tests/fcdp/test_check.py",
        "tests/fcdp/test_durable.py",
        "tests/fcdp/test_fsdp2.py",
        "tests/fcdp/test_guard.py",
        "tests/fcdp/test_ledger.py",
        "tests/fcdp/test_staleness.py",
        "tests/fcdp/test_topology.py",
        "tests/test_ranks.py",
    ),
    "streams": ("tests/fcdp/test_accelerator.py", "tests/fcdp/test_streams.py"),
    "walk": ("tests/fcdp/test_walk.py",),
    "checkpoints": (
        "tests/fcdp/test_checkpoint.py",
        "tests/fcdp/test_checkpoint_damage.py",
        "tests/fcdp/test_checkpoint_failures.py",
    ),
    "adapters": ("tests/fcdp/test_partition.py", "tests/fcdp/test_peft.py"),
    "gather extensions": ("tests/fcdp/test_extensions.py", "tests/fcdp/test_intra_node.py"),
    "expert and HSDP meshes": ("tests/fcdp/test_expert_meshes.py", "tests/fcdp/test_replicas.py"),
    "loading": ("tests/fcdp/test_pretrained.py",),
    "tensor parallelism": ("tests/fcdp/test_tensor_parallel.py",),
    "compiled": ("tests/fcdp/test_compile.py",),
    "differences": ("tests/fcdp/delta/test_training.py",),
    "plain loop": ("tests/examples/test_plain_loop.py",),
    "clients": (
        "tests/clients/test_clients.py::test_two_nodes_of_two_ranks_train_as_fsdp2_to_rounding",
    ),
}
#: Text of the table above its rows.
HEAD = """\
# The library on each release of torch

Written by `make versions`, from the files beside it: tests that passed, by suite. `make versions
RELEASES="2.15.0"` renews the column of one release; `scripts/versions.py` names the suites' files.
"""


@dataclass
class Suite:
    """Outcome of one suite on one release: numbers of tests, and names of those that failed."""

    release: str
    torch: str
    suite: str
    date: str
    commit: str
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    #: Tests by the reason that they were skipped for.
    skipped: dict[str, int] = field(default_factory=dict)
    #: Sum over the tests, which two processes share.
    seconds: float = 0.0


def suite_of(module: str) -> str:
    """The suite of a module of tests, by the longest of its paths that the module is in."""
    places = {
        place.partition(".py")[0].replace("/", "."): suite
        for suite, places in SUITES.items()
        for place in places
    }
    return places[max((place for place in places if f"{module}.".startswith(f"{place}.")), key=len)]


def run(release: str, short: bool) -> list[Suite]:
    """Run the suites; return what each came to.

    Raises ``ChildProcessError`` where pytest could not run them.
    """
    commit = _commit()  # before the minutes in which the tree may change
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tier = "not gpu and not system and not drawn" if short else "not gpu"
        command = [sys.executable, "-m", "pytest", "-q", "-m", tier, "--junitxml", str(report)]
        command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command += [place for places in SUITES.values() for place in places]
        variables = {**os.environ, "FCDP_CLIENTS_PYTHON": sys.executable}
        status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        if status not in (0, 1):
            raise ChildProcessError(f"pytest ended with status {status}: the lines above say why")
        return count(release, commit, ElementTree.parse(report).getroot())


def count(release: str, commit: str, report: ElementTree.Element) -> list[Suite]:
    """Count the tests of pytest's report by suite."""
    build = metadata.version("torch")
    today = datetime.now(timezone.utc).date().isoformat()
    suites = {name: Suite(release, build, name, today, commit) for name in SUITES}
    for case in report.iter("testcase"):
        module = case.attrib["classname"] or case.attrib["name"]  # the second of a skipped module
        suite = suites[suite_of(module)]
        suite.seconds += float(case.attrib["time"])
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            suite.failed.append(f"{module}::{case.attrib['name']}")
        elif skipped is not None:
            why = skipped.attrib["message"]
            suite.skipped[why] = suite.skipped.get(why, 0) + 1
        else:
            suite.passed += 1
    return [*suites.values()]


def _commit() -> str:
    """The commit that was tested, with ``-dirty`` if more than these results differs from it."""
    changes = _git("status", "--porcelain", "--", ".", ":!results/versions")
    return _git("rev-parse", "--short=8", "HEAD") + ("-dirty" if changes else "")


def _git(*arguments: str) -> str:
    command = ("git", *arguments)
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(suites: Sequence[Suite], folder: Path = RESULTS) -> None:
    """Write the file of one release, and the table of all."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(suite)) + "\n" for suite in suites]
    (folder / f"{suites[0].release}.jsonl").write_text("".join(lines), encoding="utf-8")
    tabulate(folder)


def read(folder: Path = RESULTS) -> dict[str, dict[str, Suite]]:
    """Read what was kept, by release, from the oldest on, and suite."""
    kept = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: _order(path.stem)):
        lines = path.read_text(encoding="utf-8").splitlines()
        suites = [Suite(**json.loads(line)) for line in lines]
        kept[path.stem] = {suite.suite: suite for suite in suites}
    return kept


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else sys.maxsize for part in release.split("."))


def tabulate(folder: Path = RESULTS) -> None:
    """Write the table of all releases that have a file."""
    text = "\n".join([HEAD, *_lines(read(folder))])
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")


def _lines(kept: dict[str, dict[str, Suite]]) -> Iterator[str]:
    some = [next(iter(suites.values())) for suites in kept.values()]
    yield from _rows(
        ("Suite", *kept),
        *((name, *(_counts(suites.get(name)) for suites in kept.values())) for name in SUITES),
        ("built as", *(suite.torch for suite in some)),
        ("on", *(suite.date for suite in some)),
        ("commit", *(suite.commit for suite in some)),
    )
    all_of = [suite for suites in kept.values() for suite in suites.values()]
    if failed := [(suite.release, test) for suite in all_of for test in suite.failed]:
        yield "\n## Failed\n"
        yield from _rows(("Release", "Test"), *((release, f"`{test}`") for release, test in failed))
    if reasons := {(suite.suite, why): None for suite in all_of for why in suite.skipped}:
        yield "\n## Skipped, and why\n"
        yield from _rows(
            ("Suite", "Why", *kept),
            *(
                (name, why, *(_number(suites, name, why) for suites in kept.values()))
                for name, why in reasons
            ),
        )


def _rows(head: Sequence[str], *rows: Sequence[str]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def _counts(suite: Suite | None) -> str:
    if suite is None:
        return "–"
    failed, skipped = len(suite.failed), sum(suite.skipped.values())
    parts = [str(suite.passed)]
    parts += [f"**{failed} failed**"] if failed else []
    parts += [f"{skipped} skipped"] if skipped else []
    return ", ".join(parts)


def _number(suites: dict[str, Suite], name: str, why: str) -> str:
    return str(suites[name].skipped.get(why, 0) or "") if name in suites else "–"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.versions")
    parser.add_argument("release", nargs="?", help="the file's name: a release, or nightly")
    parser.add_argument(
        "--short", action="store_true", help="what make test runs of them; keep nothing"
    )
    options = parser.parse_args(arguments)
    if options.release is None:
        tabulate()
        return 0
    suites = run(options.release, options.short)
    if not options.short:
        write(suites)
    return int(any(suite.failed for suite in suites))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
