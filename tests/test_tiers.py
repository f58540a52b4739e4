"""Each test is in one tier, and unit tests start nothing."""

import re

import pytest

from tests.programs import ROOT
from tests.tiers import (
    DRAWN,
    FIXTURES,
    PLACES,
    SECONDS,
    draws,
    further_rows,
    longest_first,
    starts_processes,
    tier_of,
)


@pytest.mark.parametrize(
    ("marks", "fixtures", "file", "tier"),
    [
        (set(), set(), "tests/fcdp/test_a.py", "unit"),
        ({"gpu"}, {"tmp_path"}, "tests/fcdp/test_a.py", "unit"),
        (set(), {"tmp_path", "ranks"}, "tests/fcdp/test_a.py", "ranks"),
        (set(), {"ranks", "privileged"}, "tests/fcdp/test_a.py", "cluster"),
        ({"cluster"}, {"ranks"}, "tests/fcdp/test_a.py", "cluster"),
        (set(), {"ranks"}, "tests/experiments/clusters/deeper/test_a.py", "cluster"),
        ({"unit"}, set(), "tests/launch/test_a.py", "unit"),
        (set(), set(), "tests/launcher", "unit"),
        (set(), {"ranks"}, "tests/docs/test_a.py", "system"),
        (set(), {"privileged"}, "tests/experiments/clusters/test_ssh.py", "system"),
        ({"cluster"}, {"privileged"}, "tests/experiments/worker/test_worker.py", "cluster"),
    ],
)
def test_fixtures_marks_and_places_say_the_tier(
    marks: set[str], fixtures: set[str], file: str, tier: str
) -> None:
    assert tier_of(marks, fixtures, file) == tier


def test_the_places_and_fixtures_are_there() -> None:
    assert [place for place in PLACES if not (ROOT / place).exists()] == []
    texts = [path.read_text() for path in (ROOT / "tests").rglob("conftest.py")]
    defined = {name for text in texts for name in re.findall(r"^def (\w+)\(", text, re.MULTILINE)}
    assert FIXTURES.keys() <= defined
    assert [file for file in DRAWN if not (ROOT / file).is_file()] == []


def test_a_test_is_in_one_tier() -> None:
    with pytest.raises(ValueError, match="marked as unit and ranks"):
        tier_of({"ranks", "unit"}, set())
    with pytest.raises(ValueError, match="marked as ranks, and uses a fixture of cluster"):
        tier_of({"ranks"}, {"privileged"})


def test_the_longest_file_comes_first() -> None:
    longest = max(SECONDS, key=lambda file: SECONDS[file])
    tests = [("a", "unit")] * 19 + [("b", "ranks")] * 2 + [("c", "cluster"), (longest, "unit")]
    assert longest_first(tests) == [longest, "c", "b", "a"]
    assert [file for file in SECONDS if not (ROOT / file).is_file()] == []


def test_of_tests_that_start_processes_all_rows_but_the_first_are_drawn() -> None:
    rows = ["a::b[1]", "a::b[2-x[0]]", "a::d", "b::b[2]", "b::b[1]", "a::b[3]"]
    assert further_rows(rows) == {"a::b[2-x[0]]", "b::b[1]", "a::b[3]"}
    assert starts_processes({"system"}, {"tmp_path", "pools"})
    assert starts_processes({"cluster"}, set())
    assert not starts_processes({"system", "unit"}, {"tmp_path", "committed"})


@pytest.mark.parametrize(("rows", "share"), [(3, 3), (24, 3), (32, 4)])
def test_a_seed_draws_a_third_or_some_eight_rows_and_many_draw_all(rows: int, share: int) -> None:
    tests = [f"tests/test_a.py::test_a[{row}]" for row in range(300)]
    seeds = [str(seed) for seed in range(10 * share)]
    drawn = [{test for test in tests if draws(seed, test, rows)} for seed in seeds]
    assert all(0.6 < len(each) * share / 300 < 1.4 for each in drawn)
    assert set.union(*drawn) == {*tests}
