"""Over a grid: what is taken, the rows that are shown, and sentences that agree with them."""

import re
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest

from baselines.registry import find, schedule_of
from simulation.planner.plan import Plan, _options, differs, plan, speed
from simulation.planner.report import table
from simulation.planner.request import Request
from tests.experiments.command_line import rendered
from tests.experiments.golden import tables
from tests.simulation.planner.made_up import rented

MODELS = (("llama-3-8b", "a100-80gb"), ("llama-3-70b", "a100-80gb"), ("phi-4", "a40"))
GBIT_S = (1, 25, 400)
#: Strategies of each kind that people choose from.
STRATEGIES = (
    "ddp", "fsdp2", "fsdp2-hsdp", "fsdp2-hsdp-offload", "hpz", "zeropp", "pipeline", "fcdp",
    "fcdp-offload",
)  # fmt: skip
#: All parameters are trained, and adapters of rank 16, by turns.
GRID = [*zip(product(MODELS, GBIT_S), cycle((None, 16)))]


@pytest.fixture(scope="module", params=GRID, ids=str)
def made(request: pytest.FixtureRequest) -> Plan:
    ((model, gpu), gbit_s), rank = request.param
    asked = Request(
        model=model,
        hardware=rented(gpu, gbit_s=gbit_s),
        lora_rank=rank,
        sequence_lengths=(2048,),
        strategies=STRATEGIES,
        global_batch="usual",
    )
    return plan(asked, flips=True)


def test_nothing_as_exact_is_faster_by_more_than_six_percent(made: Plan) -> None:
    alike = [one for one in made.verdicts if differs(one.strategy) == differs(made.strategy)]
    assert speed(made.taken) >= 0.94 * max(map(speed, alike))
    speeds = [*map(speed, made.verdicts)]
    assert speeds == sorted(speeds, reverse=True), "rows are in another order"


def test_each_kind_has_a_row_among_ten(made: Plan) -> None:
    lines = rendered(table(made), 200)
    start = next(at for at, line in enumerate(lines) if line.startswith("strategy")) + 2
    rows = lines[start : lines.index("", start)]
    assert len(rows) <= 10
    fitting = [one for one in made.verdicts if one.best]
    for kind in (
        lambda one: one is made.taken,
        lambda one: schedule_of(one.strategy).cut,
        lambda one: find(one.strategy).engine in ("fsdp2", "ddp"),
        lambda one: one.uses_fcdp,
        lambda one: differs(one.strategy),
    ):
        of = [one for one in fitting if kind(one)]
        if of:
            best = max(of, key=speed)
            assert any(f"{best.best.tokens_per_s:,.0f}" in row for row in rows), best.name
    assert all(("~" in row) == ("zeropp" in row) for row in rows)


def test_sentences_say_one_thing(made: Plan) -> None:
    forms = [one for one in made.verdicts if one.uses_fcdp]
    worthless = re.search("FCDP (gains nothing|is worth nothing|does not fit)", made.reason)
    if made.taken.uses_fcdp:
        assert not worthless
        assert "without FCDP" in made.reason
    else:
        best = max(forms, key=speed)
        reached = f"FCDP's best form, {best.name}, reaches"
        behind = reached in made.reason
        assert bool(worthless) != behind
        if "gains nothing" in made.reason:
            assert best.name in made.ties
        if behind:
            assert best.name not in made.ties
    assert ("its price: the model is cut" in made.reason) == schedule_of(made.strategy).cut
    sentence = made.flip.sentence(made.taken)
    if made.flip.taken is None:
        assert sentence.startswith(f"none: {made.taken.name} is taken with --kernels fused")
    else:
        assert made.flip.taken.name != made.taken.name
        assert f"{made.flip.taken.name} would be taken" in sentence
    for name in re.findall("as fast, within .*: (.*)$", made.reason):
        assert {each for each in name.split(", ") if " and " not in each} <= {*made.ties}


def test_no_option_before_the_flip_changes_what_is_taken(made: Plan) -> None:
    """Each option's whole plan takes what the flip says, rows that did not fit among them."""
    for option, changed in _options(made.request):
        whole = plan(changed)
        if option == made.flip.option:
            assert made.flip.taken.name == whole.taken.name
            return
        assert whole.taken.name == made.taken.name, option


@pytest.mark.parametrize("flip", tables(__file__))
def test_flips_where_not_all_have_a_row_before_and_after(flip: dict[str, Any]) -> None:
    asked = {k: tuple(v) if isinstance(v, list) else v for k, v in flip["asked"].items()}
    request = Request(hardware=rented(**flip["cluster"]), global_batch="usual", **asked)
    made = plan(request, flips=True)
    assert made.flip.sentence(made.taken).startswith(flip["says"])


def test_both_ways_to_keep_a_large_base_in_host_memory_are_shown() -> None:
    """LoRA of 405B on two nodes of GPUs with 96 GB: FCDP over offloaded shards, and replicas."""
    asked = Request(
        model="llama-3.1-405b",
        hardware=replace(rented("h100-96gb", nodes=2, gbit_s=100), host_memory_bytes=2e12),
        lora_rank=16,
        sequence_lengths=(4096,),
        strategies=("fsdp2-hsdp-offload", "fsdp2-offload", "fcdp", "fcdp-offload"),
        global_batch="usual",
    )
    made = plan(asked)
    assert made is not None
    lines = rendered(table(made), 200)
    speeds = {one.strategy: speed(one) for one in made.verdicts}
    for name in ("fcdp-offload", "fsdp2-hsdp-offload"):
        assert any(line.startswith(name) and f"{speeds[name]:,.0f}" in line for line in lines)
        assert speeds[name] > 2 * speeds["fsdp2-offload"]
    assert made.strategy == "fsdp2-hsdp-offload"
    assert "FCDP is worth nothing here: " in made.reason, "its host memory is no more"
