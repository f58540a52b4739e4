"""The committed claims are well-formed, and a mistake in such a file is named."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.claims import papers
from analysis.claims.computations import Ratio
from analysis.load import matrices
from tests.analysis.claims import made_up
from tests.experiments.golden import cases, check_refused
from tests.programs import ROOT

CHECK: dict[str, Any] = made_up.FIELDS["check"]
CLAIM = made_up.claim(CHECK)
#: Mistakes in a file, and the error of each.
MISTAKES = cases(Path(__file__).with_name("mistakes.txt"))


def comparing(**sides: Any) -> dict[str, Any]:
    """The check, of other cells."""
    return {**CHECK, "compute": {**CHECK["compute"], **sides}}


def written(values: dict[str, Any], folder: Path) -> Path:
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True, sort_keys=False), "utf-8")
    return path


def test_the_committed_claims_are_the_same_when_they_are_written_again(tmp_path: Path) -> None:
    claims = papers.load()
    assert {claim.paper for claim in claims.claims} == set(claims.papers)
    again = claims.model_dump(mode="json", exclude_defaults=True)
    assert papers.load(written(again, tmp_path)) == claims


def loaded(kind: str, value: dict[str, Any], folder: Path) -> papers.Claims:
    """Load a ``file`` of other contents, or one whose ``claim`` has other fields.

    So may its check have, and what that computes. It may be the ``second`` one, or a hypothesis.
    """
    if kind == "file":
        return papers.load(written(made_up.content(CLAIM, **value), folder))
    check = comparing(**value.pop("compute", {})) | value.pop("check", {})
    changed = made_up.claim(check, **value)
    contents = {
        "claim": made_up.content(changed),
        "second": made_up.content(CLAIM, changed),
        "hypothesis": made_up.content(CLAIM, hypotheses=[changed]),
    }
    return papers.load(written(contents[kind], folder))


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named_with_its_line_and_claim(case: str, tmp_path: Path) -> None:
    check_refused(case, MISTAKES[case], lambda *case: loaded(*case, tmp_path))


def test_strategies_of_a_matrix_without_a_file_are_those_of_any(tmp_path: Path) -> None:
    def load(strategy: str) -> None:
        check = comparing(of={"strategy": strategy, "model": "gpt-30b"})
        of_study = made_up.claim({**check, "matrix": "study"})
        use = {"study": {"command": "run"}}
        papers.load(written(made_up.content(of_study, matrices=use), tmp_path))

    load("qwz")
    with pytest.raises(ValueError, match="'qzw' is not in the matrix study"):
        load("qzw")


@pytest.mark.parametrize(
    ("tolerance", "interval", "decides"),
    [
        ({"relative": 0.1}, (1.9, 2.1), True),
        ({"relative": 0.1}, (1.0, 3.0), False),
        ({"relative": 0.1}, (2.1, 2.3), False),
        ({"relative": 0.1}, (2.3, 2.5), True),
        ({"at_least": 1}, (0.9, 1.1), False),
        ({"at_most": 1}, (0.8, 0.9), True),
    ],
)
def test_an_interval_decides_as_a_whole(
    tolerance: dict[str, float], interval: tuple[float, float], decides: bool
) -> None:
    assert papers.Tolerance(**tolerance).decides(interval, 2.0) is decides


def test_speeds_over_zero3_are_over_both_engines_at_every_link() -> None:
    over: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for claim in papers.load().every:
        for check in claim.checks:
            compute = check.compute
            if isinstance(compute, Ratio) and compute.quantity == "tokens_per_s":
                # Where a matrix has one link it need not be named.
                several = len(matrices.names(check.matrix).get("link", ())) > 1
                link = compute.of.link if several else None
                of = claim.id, check.matrix, link, compute.of.nodes
                over[of].add(compute.over.strategy or "")
    both, compared = {"deepspeed-zero3", "zero3"}, 0
    for (claim, matrix, *_), strategies in over.items():
        # The one exception compares two systems of DeepSpeed's, neither of them ours.
        if strategies & both and claim != "fcdp-offload-loses-throughput":
            compared += 1
            assert strategies >= both & {*matrices.names(str(matrix))["strategy"]}, (claim, matrix)
    assert compared > 10


def test_the_tests_that_claims_name_exist() -> None:
    named = [test for claim in papers.load().every for test in claim.shown_by]
    assert named
    for test in named:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text("utf-8"), test
