"""A process of its own for the accelerator, which PyTorch does not forget again.

Tests of the files in ``ALSO`` run on ranks on the accelerator too.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fcdp.on_streams import OnStreams
from tests.ranks import Pools
from tests.tiers import leave_out

#: Files whose tests run on the accelerator, too: in CI the first of each file, with
#: ``--exhaustive`` all.
ALSO = ("reports.", "upstream.", "test_accumulate", "test_api", "test_peft", "test_staleness")
#: But this one: PEFT reads what was saved onto the CPU.
ON_CPUS = "reports.test_adapter_is_not_saved"
#: Why others of these files cannot run there, by the test's name.
NOT_THERE = {
    **dict.fromkeys(
        (
            "test_adapters_take_turns",
            "test_an_adapter_is_added_after_sharding",
            "test_an_embedding_is_resized_after_sharding",
            "test_micro_batches_without_accumulate",
            "test_nothing_is_said_of_ignored_parameters_and_other_models",
            "test_who_uses_accumulate_is_told_nothing",
        ),
        "threads share what is logged",
    ),
    **dict.fromkeys(
        (
            "test_resharding_by_hand",
            "test_set_reshard_after_backward",
            "test_set_reshard_after_forward",
        ),
        "threads share what counts",
    ),
    "test_set_all_reduce_hook": "FSDP2 reduces into memory in which a hook still writes",
    "test_an_optimizer_is_made_after_a_forward_without_gradients": "threads share what follows it",
    "test_inference_mode_is_refused_before_anything_is_changed": "its tensors wrap plain ones",
    "test_a_full_state_dict_from_rank_0": "PyTorch asks a group for devices, in C++",
    "test_a_model_initialised_from_the_meta_device": "the device knows no tensors without memory",
    "test_a_model_loaded_from_the_meta_device": "its parameters, offloaded, are on the device",
    "test_bad_input_is_refused": "models on the CPU are refused, too: there they are on the device",
    "test_units_are_gathered_and_reduced_as_often": "its groups are Python's: nothing counts them",
    "test_under_unchanged_the_ranks_agree_once_and_a_step_is_seen": "threads share what counts",
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same numbers whatever ran before: some of them hide a fault."""
    torch.manual_seed(0)


@pytest.fixture(scope="package")
def apart() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def streams(apart: Pools) -> OnStreams:
    """Threads with accelerators, in a few schedules."""
    return OnStreams(apart, schedules=8)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, pools: Pools) -> Pools:
    """Processes with CPUs, or threads with accelerators."""
    if getattr(request, "param", "cpu") == "cpu":
        return pools
    return OnStreams(
        request.getfixturevalue("apart"), samples=not request.config.getoption("--exhaustive")
    )


@pytest.fixture
def artifacts(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of ``--keep``, if given: a trace that is written there outlives the test."""
    return Path(pytestconfig.getoption("--keep") or tmp_path).absolute()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    file = metafunc.module.__name__.removeprefix("tests.fcdp.")
    if "ranks" in metafunc.fixturenames and file.startswith(ALSO) and file != ON_CPUS:
        why = NOT_THERE.get(metafunc.function.__name__)
        marks = [
            pytest.mark.system,
            pytest.mark.accelerator,
            *([pytest.mark.skip(why)] if why else []),
        ]
        there = pytest.param("accelerator", id="accelerator", marks=marks)
        cpu = pytest.param("cpu", id=pytest.HIDDEN_PARAM)
        metafunc.parametrize("ranks", [cpu, there], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of each file on the accelerator, of any shape, unless all are wanted."""
    if config.getoption("--exhaustive"):
        return
    there = defaultdict(list)
    for item in items:
        runs = isinstance(item, pytest.Function) and not item.get_closest_marker("skip")
        if runs and "accelerator" in _params(item).values():
            there[item.path].append(item)
    left_out = [
        item
        for first, *others in there.values()
        for item in others
        if _but_shape(item) != _but_shape(first)
    ]
    leave_out(config, items, left_out)


def _but_shape(item: pytest.Function) -> tuple[str, dict[str, Any]]:
    params = {name: value for name, value in _params(item).items() if name != "shape"}
    return item.originalname, params


def _params(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
