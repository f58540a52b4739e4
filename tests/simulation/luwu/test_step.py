"""LuWu's seconds per step: beside the quiet matrix of two slow links, and what each part does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.hardware import Hardware
from simulation.luwu import Server, like
from simulation.prediction import Prediction, predict, simulate_built, with_server
from simulation.workload import Workload
from tests.simulation.luwu.records import compared
from tests.simulation.workloads import hardware, workload


def test_both_slow_links_are_predicted_and_nothing_is_fitted_to_them() -> None:
    found = compared("speed")
    assert {record.cell.inter_bandwidth_bits_per_s for record, _ in found} == {5e6, 20e6}
    for _, comparison in found:
        assert abs(comparison.relative_error) < 0.1


def test_a_step_takes_longer_than_its_pulls_as_the_last_gradients_must_be_applied() -> None:
    """At 5 Mbit/s 4P take 2.84 s, and a step 3.67 s."""
    for _, comparison in compared("speed"):
        step, prediction = comparison.measured, comparison.prediction
        pulls = (prediction.link_bytes or {})["node received"] / step.hardware.inter_bytes_per_s
        block = step.workload.model.block_parameters + step.workload.model.root_parameters
        pushes = step.workload.element_bytes * block / step.hardware.inter_bytes_per_s
        assert prediction.step_seconds >= pulls + pushes
        # On these links both take nearly all of it.
        assert prediction.step_seconds == pytest.approx(pulls + pushes, rel=0.1)


def slow(**more: float) -> tuple[Workload, Hardware, Server]:
    """A link that all waits for."""
    given = workload("luwu")
    cluster = hardware(1e9, nodes=2, ranks_per_node=1)
    return given, cluster, replace(like(cluster), **more)


def steps(given: Workload, cluster: Hardware, server: Server) -> Prediction:
    return simulate_built(with_server(given, cluster, server))


def test_a_step_is_as_long_however_many_workers_there_are() -> None:
    given, cluster, server = slow()
    few = steps(given, cluster, server).step_seconds
    assert steps(given, replace(cluster, nodes=32), server).step_seconds == pytest.approx(few)


def test_ranks_of_a_node_share_its_link() -> None:
    given, cluster, server = slow()
    fast = replace(server, link_bytes_per_s=1e12)
    alone = steps(given, cluster, fast).step_seconds
    shared = steps(given, replace(cluster, ranks_per_node=4), fast).step_seconds
    assert shared > 3 * alone


def test_the_optimizer_hides_behind_backward_until_the_drives_are_slower_than_links() -> None:
    given, cluster, server = slow()
    usual = steps(given, cluster, server)
    slower = steps(given, cluster, replace(server, disk_write_bytes_per_s=1e9))
    assert slower.step_seconds < 1.1 * usual.step_seconds
    slowest = steps(given, cluster, replace(server, disk_write_bytes_per_s=1e7))
    written = (slowest.link_bytes or {})["server file_written"] / 1e7
    assert slowest.step_seconds >= written
    assert slowest.bottleneck == "server_disk"


def test_no_step_undercuts_its_busiest_resource_and_all_steps_are_alike() -> None:
    given, cluster, server = slow()
    built = with_server(given, cluster, server)
    found = simulate_built(built)
    assert found.step_seconds >= built.least_seconds * (1 - 1e-9)
    assert max(found.busy.values()) <= 1 + 1e-9
    assert min(span.start for span in found.timeline.spans) >= -1e-9


def test_the_ledger_is_one_steps() -> None:
    given, cluster, server = slow()
    found = steps(given, cluster, server)
    assert found.inter_node_bytes == 2 * given.parameters
    assert sum(found.moved_bytes["inter_node_in"].values()) == 4 * given.parameters


def test_frozen_layers_that_are_kept_make_adapters_fast() -> None:
    given = workload("luwu", lora=True)
    cluster = hardware(1e9, nodes=2, ranks_per_node=1)
    again = predict(given, cluster).step_seconds
    assert predict(replace(given, cached=True), cluster).step_seconds < again / 2


def test_what_it_does_not_train_is_refused() -> None:
    cluster = hardware()
    with pytest.raises(ValueError, match="accumulation = 2: allowed with luwu is 1"):
        predict(workload("luwu", accumulation=2), cluster)
    four = workload("luwu", lora=True, frozen_dtype="nf4")
    with pytest.raises(ValueError, match="frozen_dtype = 'nf4'"):
        predict(four, cluster)
