"""Refusals of requests that cannot be simulated, with the field, the value and what is allowed.

``refusals.txt`` has what is asked for, by its name in ``ASKED`` and as YAML, and in the lines below
how the error begins, and what else is in it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from simulation import quantities
from simulation.cycle import stages_of
from simulation.hardware import cluster, described, gpu, share_of_peak
from simulation.models import from_config, shape
from simulation.traffic import difference_bits
from tests.experiments.families import configuration
from tests.experiments.golden import cases, check_refused
from tests.simulation.planner.made_up import request
from tests.simulation.workloads import hardware, paper_cluster, predicted, workload

CASES = cases(Path(__file__).with_name("refusals.txt"))


def requested(**settings: Any) -> object:
    lists = {name: tuple(each) for name, each in settings.items() if isinstance(each, list)}
    return request(**(settings | lists))


def configured(like: str | None = None, **fields: Any) -> object:
    return from_config((configuration(like) if like else {}) | fields, 16)


def on_nodes(strategy: str, nodes: int = 2, **settings: Any) -> object:
    return predicted(strategy, on=hardware(nodes=nodes), **settings)


#: By name; values that are mappings are given as arguments.
ASKED: dict[str, Callable[..., object]] = {
    "request": requested,
    "hardware": partial(replace, paper_cluster()),
    "stages": lambda strategy, **fields: stages_of(replace(workload(strategy), **fields), 4),
    "predicted": on_nodes,
    "config": configured,
    "path": lambda path: from_config(path, 16),
    "share": lambda share: share_of_peak(gpu("a40"), share),
    "gpu": lambda name: cluster(name, nodes=1, ranks_per_node=1, inter_bits_per_s=1e9),
    "described": described,
    "over": lambda arguments: hardware().over(*arguments),
    "model": lambda name: shape(name, 512),
    "link": quantities.link,
    "differences": lambda rate: difference_bits(rate, 2),
    "size_bytes": partial(quantities.size_bytes, "--option"),
    "bits_per_s": partial(quantities.bits_per_s, "--option"),
    "lora_rank": partial(quantities.lora_rank, "--option"),
}


def ask(name: str, value: Any) -> object:
    return ASKED[name](**value) if isinstance(value, dict) else ASKED[name](value)


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_with_what_is_allowed(case: str) -> None:
    check_refused(case, CASES[case], ask)
