"""No one source decides what a plan says to take: twelve examples, all with ``--exhaustive``."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from simulation.calibration import fit
from simulation.compute import Fitted, rates_by, read_rows, run_of
from simulation.hardware import Hardware
from simulation.planner.plan import Plan, plan
from simulation.planner.rent import STRATEGIES
from simulation.planner.request import Request
from tests.simulation.planner.made_up import rented

#: Models, GPUs and tunings of the map in docs/planning.md, each with a link of its own.
EXAMPLES = list(
    zip(
        product(("gemma-2b", "llama-3-8b", "llama-3-70b"), ("a40", "a100-80gb"), ({}, {"r": 8})),
        (0.1, 1, 10, 100, 0.3, 3, 30, 400, 1, 10, 100, 3),
        strict=True,
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("--exhaustive")
    metafunc.parametrize(("what", "gbit_s"), EXAMPLES if whole else EXAMPLES[::5])


@cache
def without() -> dict[str, Fitted]:
    """The fit to all other sources, by the one that is left out."""
    runs = [run_of(row) for row in read_rows() if row.bf16]
    sources = dict.fromkeys(run.row.source for run in runs)
    return {name: fit([run for run in runs if run.row.source != name]) for name in sources}


def asked(model: str, tuning: dict[str, int], hardware: Hardware) -> Plan | None:
    usual = {"sequence_lengths": (2048,), "strategies": STRATEGIES}
    return plan(Request(model=model, hardware=hardware, lora_rank=tuning.get("r"), **usual))


def test_a_source_left_out_moves_no_choice_but_a_tie(what: Any, gbit_s: float) -> None:
    model, gpu, tuning = what
    hardware = rented(gpu, gbit_s=gbit_s)
    taken = asked(model, tuning, hardware)
    for name, fitted in without().items():
        other = asked(model, tuning, replace(hardware, rates=rates_by(fitted, hardware.device)))
        if taken is None or other is None:
            assert taken is other is None, name
            continue
        tied = {*taken.ties, *other.ties}
        assert taken.strategy == other.strategy or {taken.strategy, other.strategy} <= tied, name
