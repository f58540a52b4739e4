"""A reason that is computed changes one setting, and nothing else."""

import re
from collections.abc import Mapping, Sequence

import pytest

from analysis.claims import papers
from analysis.claims.computations import Cause, Ratio, Selection, changed, setting_of
from analysis.claims.verdicts import judge
from analysis.load.rows import Row
from tests.analysis.claims.made_up import FASTER


def row(strategy: str, speed: float, matrix: str = "here", **more: object) -> Row:
    chosen = {
        "matrix": matrix,
        "strategy": strategy,
        "link": "1 Gbit/s",
        "model": "gpt-30b",
        "sequence_length": 512,
        "link_efficiency": 0.8,
        "inter_efficiency": None,
        **more,
    }
    return Row(chosen, "ok", "simulated", {"tokens_per_s": speed})


HERE = [row("fcdp", 20), row("fsdp2", 10)]


def test_cells_that_differ_in_another_setting_too_are_no_counterparts() -> None:
    both = {"matrix": "there", "sequence_length": 1024, "model": "gpt-10b"}
    there = [row("fcdp", 30, **both), row("fsdp2", 10, **both)]
    cause = Cause(matrix="there", setting="sequence_length", to=1024)
    assert changed(cause, FASTER, HERE, there) is None


def test_a_share_that_is_not_given_is_that_of_all_links() -> None:
    lower = {"matrix": "there", "inter_efficiency": 0.4}
    there = [row("fcdp", 20, **lower), row("fsdp2", 5, **lower)]
    change = changed(Cause(matrix="there", setting="inter_efficiency", to=0.4), FASTER, HERE, there)
    assert (change.was, change.after[0].value) == ((0.8,), 4.0)


def test_a_setting_may_be_changed_in_one_of_two_cells() -> None:
    slow, fast = Selection(strategy="fcdp", link="1 Gbit/s"), Selection(link="100 Gbit/s")
    keeps = Ratio(kind="ratio", quantity="tokens_per_s", of=slow, over=fast)
    here = [row("fcdp", 5), row("fcdp", 20, link="100 Gbit/s")]
    there = [row("fcdp", 10, "there", link="100 Gbit/s", inter_efficiency=0.4)]
    there.append(row("fcdp", 1, "there", inter_efficiency=0.4))
    cause = Cause(matrix="there", setting="inter_efficiency", to=0.4, side="over")
    change = changed(cause, keeps, here, there)
    assert (change.before[0].value, change.after[0].value) == (0.25, 0.5)


def test_another_comparator_stands_in_the_place_of_the_claims() -> None:
    there = [row("fsdp2-reshard", 4, "there")]
    cause = Cause(matrix="there", setting="strategy", to="fsdp2-reshard", side="over")
    change = changed(cause, FASTER, HERE, there)
    assert change.after[0].value == 5.0


def test_a_setting_that_no_cell_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="'weather' is no setting of a cell; allowed: .*nodes"):
        setting_of(Cause(matrix="there", setting="weather", to=1))


def test_every_cause_that_claims_name_is_shown_with_both_numbers(
    committed: Mapping[str, Sequence[Row]],
) -> None:
    for finding in judge(papers.load(), committed):
        if finding.check is None or finding.verdict not in ("not reproduced", "differs"):
            continue
        computed = [reason for reason in finding.reasons if " alone changed from " in reason]
        assert len(computed) == len(finding.check.causes), finding.claim.id
        for reason in computed:
            numbers = re.search(r"gives (\S+).* instead of (\S+)", reason)
            assert numbers[1] != numbers[2], reason
