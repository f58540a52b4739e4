"""LuWu's bytes by link and direction, by hand and beside the kernel's counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation import luwu
from simulation.luwu import Traffic
from simulation.workload import Workload
from tests.simulation.luwu.records import BYTES, compared
from tests.simulation.workloads import workload

#: What the kernel counts beside LuWu's own bytes: headers, encryption, acknowledgements, signs of
#: life; of all bytes that a machine has in one direction, and per message in the other.
SHARE, MESSAGE_BYTES = 0.025, 250


def of(given: Workload, workers: int = 4, ranks: int = 1) -> Traffic:
    return luwu.traffic(given, workers, ranks)


def test_a_worker_receives_each_parameter_twice_and_sends_each_gradient_once() -> None:
    given = workload("luwu")
    links = of(given).links
    nbytes = 2 * given.parameters
    assert links["node received"] == links["server sent"] == 2 * nbytes
    assert links["node sent"] == links["server received"] == nbytes
    assert links["server file_read"] == 16 * given.parameters
    assert links["server file_written"] == 14 * given.parameters


def test_the_servers_bytes_do_not_depend_on_the_workers_and_a_node_has_those_of_its_ranks() -> None:
    given = workload("luwu")
    few, many = of(given, workers=1), of(given, workers=64, ranks=8)
    assert few.links["server sent"] == many.links["server sent"]
    assert few.server_messages == many.server_messages
    assert many.links["node received"] == 8 * few.links["node received"]


def test_messages_grow_with_the_workers_where_acknowledgements_are_not_merged() -> None:
    given = replace(workload("luwu"), merged=False)
    one, two, three = (of(given, workers).server_messages for workers in (1, 2, 3))
    assert three - two == two - one > 0
    assert one == of(replace(given, merged=True), 3).server_messages


def test_frozen_layers_are_pulled_twice_or_once_for_all_steps() -> None:
    given = workload("luwu", lora=True)
    again, kept = of(given), of(replace(given, cached=True))
    assert again.received == 4 * given.parameters
    assert kept.received == 4 * given.trained
    assert again.sent == kept.sent == 2 * given.trained


@pytest.mark.parametrize("name", [*BYTES, "speed", "pipeline"])
def test_links_and_messages_are_those_of_the_records(name: str) -> None:
    assert compared(name)
    for record, comparison in compared(name):
        measured, predicted = record.measurement, comparison.prediction
        assert measured is not None
        assert measured.link_bytes_per_step is not None
        assert predicted.link_bytes is not None
        if measured.server_messages_per_step is not None:
            assert measured.server_messages_per_step == predicted.server_messages
        step = comparison.measured
        messages = of(step.workload, step.hardware.world_size).worker_messages
        for link, counted in measured.link_bytes_per_step.items():
            payload = predicted.link_bytes[link]
            beside = SHARE * payload + MESSAGE_BYTES * messages
            assert payload <= counted <= payload + beside, (record.cell_id, link)
        assert comparison.bytes_agree


@pytest.mark.parametrize("name", [*BYTES, "speed"])
def test_all_links_are_within_a_fortieth_where_all_is_trained(name: str) -> None:
    for record, comparison in compared(name):
        if record.cell.tuning != "full":
            continue
        assert record.measurement is not None
        for link, counted in (record.measurement.link_bytes_per_step or {}).items():
            assert counted == pytest.approx(
                (comparison.prediction.link_bytes or {})[link], rel=0.025
            )


def test_files_are_two_generations_and_the_frozen_layers() -> None:
    full, lora = workload("luwu"), workload("luwu", lora=True)
    assert luwu.files_bytes(full) == 28 * full.parameters
    assert luwu.files_bytes(lora) == 28 * lora.trained + 2 * lora.frozen
