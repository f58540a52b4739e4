"""Over a grid: what is taken, the rows that are shown, and sentences that agree with them."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from baselines.registry import find, schedule_of
from simulation.planner.plan import Plan, _options, differs, plan, speed
from simulation.planner.report import table
from simulation.planner.request import Request
from tests.experiments.command_line import rendered
from tests.simulation.planner.made_up import config_file, rented

MODELS = (("llama-3-8b", "a100-80gb"), ("llama-3-70b", "a100-80gb"), ("phi-4", "a40"))
GBIT_S = (1, 25, 400)
#: Strategies of each kind that people choose from.
STRATEGIES = (
    "ddp", "fsdp2", "fsdp2-hsdp", "fsdp2-hsdp-offload", "hpz", "zeropp", "pipeline", "fcdp",
    "fcdp-offload",
)  # fmt: skip
GRID = list(product(MODELS, GBIT_S, (None, 16)))


@pytest.fixture(scope="module", params=GRID, ids=str)
def made(request: pytest.FixtureRequest) -> Plan:
    (model, gpu), gbit_s, rank = request.param
    asked = Request(
        model=model,
        hardware=rented(gpu, gbit_s=gbit_s),
        lora_rank=rank,
        sequence_lengths=(2048,),
        strategies=STRATEGIES,
        global_batch="usual",
    )
    answer = plan(asked, flips=True)
    assert answer is not None
    return answer


def test_nothing_as_exact_is_faster_by_more_than_six_percent(made: Plan) -> None:
    alike = [one for one in made.verdicts if differs(one.strategy) == differs(made.strategy)]
    assert speed(made.taken) >= 0.94 * max(map(speed, alike))


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
    assert made.flip is not None
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
    assert made.flip is not None
    for option, changed in _options(made.request):
        whole = plan(changed)
        assert whole is not None
        if option == made.flip.option:
            assert made.flip.taken is not None
            assert made.flip.taken.name == whole.taken.name
            return
        assert whole.taken.name == made.taken.name, option


def test_a_flip_to_what_did_not_fit_before() -> None:
    asked = Request(
        model="llama-3-70b",
        hardware=rented("a40", gbit_s=100),
        strategies=("fsdp2", "fsdp2-offload"),
        sequence_lengths=(8192,),
        global_batch="usual",
    )
    made = plan(asked, flips=True)
    assert made is not None
    assert made.flip is not None
    assert made.flip.taken is not None
    flip = made.strategy, made.flip.option, made.flip.taken.name
    assert flip == ("fsdp2-offload", "--states int8", "fsdp2")


def test_the_flip_is_what_a_plan_with_that_option_takes() -> None:
    """README's case: hybrid sharding lacks memory that fused kernels leave."""
    asked = Request(
        model="llama-3-70b",
        hardware=rented("l40s"),
        lora_rank=16,
        strategies=("fsdp2-hsdp", "fcdp"),
        global_batch="usual",
    )
    first = plan(asked, flips=True)
    assert first is not None
    assert first.flip is not None
    assert first.flip.taken is not None
    assert (first.strategy, first.flip.option) == ("fcdp", "--kernels fused")
    fused = plan(replace(asked, kernels="fused"))
    assert fused is not None
    assert fused.strategy == first.flip.taken.strategy == "fsdp2-hsdp"
    by_name = {one.name: speed(one) for one in fused.verdicts}
    assert first.flip.times == pytest.approx(by_name["fsdp2-hsdp"] / by_name["fcdp"])
    assert first.flip.sentence(first.taken).endswith("there: alike, and takes less")


def test_a_flip_to_four_bits_leaves_out_what_is_not_known_to_hold_them() -> None:
    asked = Request(
        model="gpt-30b",
        hardware=rented("a40", gbit_s=1),
        lora_rank=8,
        kernels="fused",
        strategies=("deepspeed-hpz-offload", "fcdp"),
        global_batch="usual",
    )
    made = plan(asked, flips=True)
    assert made is not None
    assert made.flip is not None
    assert "nf4" in made.flip.option


def test_both_ways_to_keep_a_large_base_in_host_memory_are_shown(tmp_path: Path) -> None:
    """LoRA of 405B on two nodes of GPUs with 96 GB: FCDP over offloaded shards, and replicas."""
    model = config_file(
        tmp_path,
        num_hidden_layers=126,
        hidden_size=16384,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=128256,
    )
    asked = Request(
        model=str(model),
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
