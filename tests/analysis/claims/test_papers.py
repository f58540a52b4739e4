"""The committed claims are well-formed, and a mistake in such a file is named."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.claims import papers
from analysis.claims.computations import Ratio
from analysis.load import matrices
from tests.analysis.claims import made_up
from tests.programs import ROOT

CHECK: dict[str, Any] = {
    "matrix": "parity",
    "compute": {
        "kind": "ratio",
        "quantity": "tokens_per_s",
        "of": {"strategy": "fcdp"},
        "over": {"strategy": "fsdp2"},
    },
    "tolerance": {"relative": 0.1},
}
CLAIM = made_up.claim(CHECK)


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


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"label": "heard"}, [":12: claims.0.label (faster)", "'text', '2nd', 'code'"]),
        ({"unit": "furlongs"}, ["claims.0.unit (faster)", "'×', '%', 'GB'"]),
        ({"unit": None}, ["claims.0 (faster)", "unit is missing", "allowed are ×"]),
        ({"unit": "%", "checks": [comparing(kind="value")]},
         ["claims.0.checks.0.compute.value.over (faster)", "Extra inputs"]),
        ({"unit": "GB"}, ["'GB' does not fit a check of kind ratio; allowed: ×, %"]),
        ({"paper": "other"}, [":9: claims.0.paper (faster)", "allowed are fcdp"]),
        ({"checks": []}, ["neither checks nor a reason"]),
        ({"checks": [{**CHECK, "matrix": "nowhere"}]},
         [":16: claims.0.checks.0.matrix (faster)", "'nowhere' is no matrix", "are parity"]),
        ({"number": None}, ["a relative tolerance needs a number"]),
        ({"checks": [{**CHECK, "tolerance": {}}]}, ["exactly one of relative, at_least, at_most"]),
        ({"checks": [{**CHECK, "tolerance": {"relative": 0.1, "at_least": 1}}]}, ["exactly one"]),
        ({"checks": [{**CHECK, "tolerance": {"at_least": 99}}]}, ["99×", "up to 10 × 2"]),
        ({"number": None, "checks": [{**CHECK, "tolerance": {"at_most": 11}}]},
         ["11×", "up to 10 × 1"]),
        ({"typo": 1}, ["claims.0.typo (faster)", "Extra inputs"]),
        ({"checks": [comparing(of={"link": "10 Mbps"})]},
         ["'10 Mbps' is not a link; allowed: unshaped, or a number"]),
        ({"checks": [comparing(of={})]}, ["is empty; allowed are strategy, tuning"]),
        ({"checks": [comparing(of={"accumulation": 0})]}, ["greater than or equal to 1"]),
        ({"checks": [comparing(of={"strategy": "fcpd"})]},
         [":21: claims.0.checks.0.compute.of.strategy (faster): 'fcpd' is not in the matrix parity",
          "allowed are ddp, deepspeed-hpz, "]),
        ({"checks": [comparing(over={"model": "its own"})]},
         [":23: claims.0.checks.0.compute.over.model (faster)", "gpt2-4x128"]),
        ({"checks": [comparing(of={"link": "1000 Mbit/s"})]}, ["parity; allowed are", "unshaped"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line_and_claim(
    change: dict[str, Any], messages: list[str], tmp_path: Path
) -> None:
    path = written(made_up.content(made_up.claim(CHECK, **change)), tmp_path)
    with pytest.raises(ValueError, match=r"^claims\.yaml:\d+: ") as error:
        papers.load(path)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (made_up.content(CLAIM, CLAIM), "'faster' is there already"),
        (made_up.content(CLAIM, matrices={"parity": {}, "soon": {}}),
         "matrices.soon: no such matrix"),
        # A number that no paper gives is a hypothesis.
        (made_up.content(CLAIM, made_up.claim(CHECK, id="other", label="derived")),
         "label (other): 'derived': allowed in claims are "),
        (made_up.content(CLAIM, hypotheses=[made_up.claim(CHECK, id="other", label="2nd")]),
         "label (other): '2nd': allowed in hypotheses are "),
    ],
)  # fmt: skip
def test_claims_that_do_not_go_together_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"^claims\.yaml:\d+: .*{re.escape(message)}"):
        papers.load(written(values, tmp_path))


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
