"""``make versions`` counts tests by suite on each release of torch, and keeps a table."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from fcdp import fsdp2
from scripts import versions
from scripts.versions import SUITES, Suite
from tests.programs import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
RELEASES = re.search(r"^RELEASES \?= (.*)$", MAKEFILE, re.MULTILINE)[1].split()

REPORT = """<testsuites><testsuite>
<testcase classname="tests.fcdp.upstream.test_after" name="test_a" time="1.5" />
<testcase classname="tests.fcdp.upstream.test_mixed_precision" name="test_b" time="2">
  <failure message="1 is not 2">...</failure></testcase>
<testcase classname="tests.fcdp.test_walk" name="test_c" time="0">
  <skipped message="from torch 2.13 on" /></testcase>
<testcase classname="tests.fcdp.test_walk" name="test_d" time="0">
  <skipped message="from torch 2.13 on" /></testcase>
<testcase classname="tests.fcdp.test_walk" name="test_e" time="0">
  <error message="no pool">...</error></testcase>
</testsuite></testsuites>"""


def counted(release: str) -> list[Suite]:
    return versions.count(release, "0123abcd", ElementTree.fromstring(REPORT))


def test_tests_are_counted_by_the_suite_that_names_their_module_most_exactly() -> None:
    suites = {suite.suite: suite for suite in counted("2.15.0")}
    assert {*suites} == {*SUITES}
    assert (suites["upstream"].passed, suites["upstream"].seconds) == (1, 1.5)
    assert suites["mixed precision"].failed == ["tests.fcdp.upstream.test_mixed_precision::test_b"]
    assert suites["walk"].failed == ["tests.fcdp.test_walk::test_e"]
    assert suites["walk"].skipped == {"from torch 2.13 on": 2}


def test_every_suite_has_its_files() -> None:
    places = [place.partition("::")[0] for places in SUITES.values() for place in places]
    assert len({*places}) == len(places)
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_a_run_renews_its_release_and_leaves_the_others(tmp_path: Path) -> None:
    for release in ("nightly", "2.15.0", "2.9.1"):
        versions.write(counted(release), tmp_path)
    before = (tmp_path / "2.9.1.jsonl").read_bytes()
    versions.write([Suite("2.15.0", "2.15.0+cpu", "walk", "2026-11-30", "abc", passed=3)], tmp_path)
    assert (tmp_path / "2.9.1.jsonl").read_bytes() == before
    assert versions.read(tmp_path)["nightly"]["walk"] == counted("nightly")[[*SUITES].index("walk")]
    rows = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert "| Suite | 2.9.1 | 2.15.0 | nightly |" in rows
    assert "| walk | 0, **1 failed**, 2 skipped | 3 | 0, **1 failed**, 2 skipped |" in rows
    assert "| upstream | 1 | – | 1 |" in rows
    assert "| 2.9.1 | `tests.fcdp.test_walk::test_e` |" in rows
    assert "| walk | from torch 2.13 on | 2 |  | 2 |" in rows


def test_the_committed_table_says_what_its_files_say(tmp_path: Path) -> None:
    for path in versions.RESULTS.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    versions.tabulate(tmp_path)
    table = (versions.RESULTS / "table.md").read_text(encoding="utf-8")
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == table


def test_every_release_has_passed() -> None:
    """A suite that is new may first have run on the oldest release and on the newest."""
    kept = versions.read()
    assert [release for release in kept if release != "nightly"] == RELEASES
    for release in RELEASES:
        assert [suite.failed for suite in kept[release].values() if suite.failed] == []
        assert kept[release]["upstream"].torch.startswith(release)
    for release in (RELEASES[0], RELEASES[-1]):
        assert {*kept[release]} == {*SUITES}


def test_what_the_library_promises_is_tested() -> None:
    ends = [tuple(map(int, release.split(".")[:2])) for release in (RELEASES[0], RELEASES[-1])]
    assert ends == [fsdp2.OLDEST, fsdp2.NEWEST]


def test_the_pinned_torch_and_the_newest_are_among_the_releases() -> None:
    for file, release in {
        "constraints.txt": "2.13.0",
        "constraints-newest.txt": RELEASES[-1],
    }.items():
        pinned = re.search(r"^torch==(\S+)", (ROOT / file).read_text(), re.MULTILINE)[1]
        assert pinned == release
        assert pinned in RELEASES


def test_the_weekly_run_has_every_release_and_a_nightly_one_that_may_fail() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())
    release = workflow["jobs"]["release"]
    assert release["strategy"]["matrix"]["release"] == [*RELEASES, "nightly"]
    assert "nightly" in release["continue-on-error"]


def test_a_run_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "walk", ("tests/fcdp/test_nothing.py",))
    ended = versions.subprocess.CompletedProcess([], 4, stdout="")
    monkeypatch.setattr(versions.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ChildProcessError, match="pytest ended with status 4"):
        versions.run("2.15.0", short=True)
