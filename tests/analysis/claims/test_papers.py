"""The committed claims are well-formed, and a mistake in such a file is named."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from analysis.claims import papers
from analysis.claims.computations import Ratio
from analysis.claims.papers import Claim
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


@pytest.mark.parametrize(("kind", "label"), [("claims", "derived"), ("hypotheses", "2nd")])
def test_what_no_paper_gives_is_a_hypothesis(kind: str, label: str, tmp_path: Path) -> None:
    other = made_up.claim(CHECK, id="other", label=label)
    values = made_up.content(CLAIM)
    values[kind] = [*values.get(kind, ()), other]
    with pytest.raises(ValueError, match=rf"label \(other\): '{label}': allowed in {kind} are "):
        papers.load(written(values, tmp_path))


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


def test_a_matrix_must_exist_or_have_a_command(tmp_path: Path) -> None:
    path = written(made_up.content(CLAIM, matrices={"parity": {}, "soon": {}}), tmp_path)
    with pytest.raises(ValueError, match=r"claims.yaml:\d+: matrices.soon: no such matrix"):
        papers.load(path)
    use = {"parity": {}, "study": {"command": "run"}}
    papers.load(written(made_up.content(CLAIM, matrices=use), tmp_path))


def test_ids_are_unique_and_what_is_not_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(made_up.content(CLAIM, CLAIM), tmp_path)
    with pytest.raises(ValueError, match="'faster' is there already"):
        papers.load(path)
    path.write_text("papers: {}\nclaims: [\n", "utf-8")
    with pytest.raises(ValueError, match=r"claims.yaml:\d: not valid YAML"):
        papers.load(path)


@pytest.mark.parametrize("part", ["of", "over"])
@pytest.mark.parametrize(
    ("selection", "allowed"),
    [
        ({"strategy": "fcpd"}, "ddp, deepspeed-hpz, "),
        ({"model": "its own"}, "gpt2-4x128"),
        ({"link": "1000 Mbit/s"}, "unshaped"),
    ],
)
def test_a_name_that_no_cell_of_the_matrix_has_is_an_error(
    part: str, selection: dict[str, str], allowed: str, tmp_path: Path
) -> None:
    path = written(made_up.content(made_up.claim(comparing(**{part: selection}))), tmp_path)
    ((setting, name),) = selection.items()
    line = path.read_text("utf-8").splitlines().index(f"        {setting}: {name}") + 1
    with pytest.raises(ValueError, match="is not in the matrix parity") as error:
        papers.load(path)
    where = f"claims.yaml:{line}: claims.0.checks.0.compute.{part}.{setting} (faster): "
    assert str(error.value).startswith(f"{where}{name!r} is not in the matrix parity; allowed are ")
    assert allowed in str(error.value)


def test_strategies_of_a_matrix_without_a_file_are_those_of_any(tmp_path: Path) -> None:
    def load(strategy: str) -> None:
        check = comparing(of={"strategy": strategy, "model": "gpt-30b"})
        of_study = made_up.claim({**check, "matrix": "study"})
        use = {"study": {"command": "run"}}
        papers.load(written(made_up.content(of_study, matrices=use), tmp_path))

    load("qwz")
    with pytest.raises(ValueError, match="'qzw' is not in the matrix study"):
        load("qzw")


@given(paper=st.floats(0.1, 1e6), relative=st.floats(0, 1), off=st.floats(-2, 2))
def test_a_relative_tolerance_admits_what_is_that_near(
    paper: float, relative: float, off: float
) -> None:
    admits = papers.Tolerance(relative=relative).admits(paper * (1 + off), paper)
    if abs(abs(off) - relative) > 1e-9:
        assert admits == (abs(off) < relative)


def _comparators(claim: Claim) -> dict[tuple[object, ...], set[str]]:
    """The strategies that speeds are compared with, by matrix, link and nodes."""
    comparators: dict[tuple[object, ...], set[str]] = {}
    for check in claim.checks:
        compute = check.compute
        if isinstance(compute, Ratio) and compute.quantity == "tokens_per_s":
            place = check.matrix, compute.of.link, compute.of.nodes
            comparators.setdefault(place, set()).add(compute.over.strategy or "")
    return comparators


def test_speeds_over_zero3_are_over_both_engines_at_every_link() -> None:
    both = {"deepspeed-zero3", "zero3"}
    compared = 0
    for claim in papers.load().every:
        if claim.id == "fcdp-offload-loses-throughput":
            continue  # compares two systems of DeepSpeed's, neither of them ours
        merged: dict[tuple[object, ...], set[str]] = {}
        for (matrix, link, nodes), over in _comparators(claim).items():
            # Where a matrix has one link it need not be named.
            single = len(matrices.names(str(matrix)).get("link", ())) < 2
            merged.setdefault((matrix, None if single else link, nodes), set()).update(over)
        for (matrix, *_), over in merged.items():
            there = both & set(matrices.names(str(matrix))["strategy"])
            if over & both:
                compared += 1
                assert over >= there, (claim.id, matrix)
    assert compared > 10


def test_the_tests_that_claims_name_exist() -> None:
    named = [test for claim in papers.load().every for test in claim.shown_by]
    assert named
    for test in named:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text("utf-8"), test
