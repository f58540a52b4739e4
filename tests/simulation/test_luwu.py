"""LuWu: bytes by link, memory, seconds and its server, by hand and beside the committed records."""

from dataclasses import replace

import pytest

from experiments.records.record import Record
from simulation import luwu
from simulation.emulated import Comparison
from simulation.hardware import Hardware
from simulation.luwu import Server, footprint, like, nominal
from simulation.prediction import predict
from simulation.workload import Workload
from tests.simulation import committed
from tests.simulation.workloads import hardware, workload

#: Matrices that compare bytes, and the one that compares times.
BYTES = ("one", "two", "three")
#: Bytes that the kernel counts beside LuWu's own: headers, encryption, acknowledgements, signs of
#: life; of all bytes that a machine has in one direction, and per message in the other.
SHARE, MESSAGE_BYTES = 0.025, 250


def compared(name: str) -> list[tuple[Record, Comparison]]:
    return [pair for pair in committed.compared(f"luwu/{name}") if pair[0].cell.strategy == "luwu"]


def test_a_worker_receives_each_parameter_twice_and_sends_each_gradient_once() -> None:
    """The server's bytes do not depend on the workers; a node has those of its ranks."""
    point = workload("luwu")
    few, many = luwu.traffic(point, 4, 1), luwu.traffic(point, 64, 8)
    links, nbytes = few.links, 2 * point.parameters
    assert links["node received"] == links["server sent"] == 2 * nbytes
    assert links["node sent"] == links["server received"] == nbytes
    assert links["server file_read"] == 16 * point.parameters
    assert links["server file_written"] == 14 * point.parameters
    assert links["server sent"] == many.links["server sent"]
    assert few.server_messages == many.server_messages
    assert many.links["node received"] == 8 * links["node received"]


@pytest.mark.parametrize("name", [*BYTES, "speed", "pipeline"])
def test_links_and_messages_are_those_of_the_records(name: str) -> None:
    assert compared(name)
    for record, comparison in compared(name):
        measured, step = record.measurement, comparison.measured
        predicted = predict(step.workload, step.hardware)
        if measured.server_messages_per_step is not None:
            assert measured.server_messages_per_step == predicted.server_messages
        messages = luwu.traffic(step.workload, step.hardware.world_size, 1).worker_messages
        for link, counted in measured.link_bytes_per_step.items():
            payload = predicted.link_bytes[link]
            beside = SHARE * payload + MESSAGE_BYTES * messages
            assert payload <= counted <= payload + beside, (record.cell_id, link)
        assert comparison.bytes_agree


def test_a_device_has_two_layers_however_many_there_are() -> None:
    point = workload("luwu", recomputed=1.0)
    deep = replace(point, model=replace(point.model, layers=4 * point.model.layers))
    few, many = footprint(point, hardware()).device, footprint(deep, hardware()).device
    assert few["gathered"] == many["gathered"]
    assert few["gradients"] == many["gradients"]
    assert few["gathered"] == 2 * 2 * point.model.block_parameters


def test_host_memory_has_cached_frozen_layers_and_files_two_generations_of_others() -> None:
    point = workload("luwu", lora=True)
    assert luwu.files_bytes(point) == 28 * point.trained + 2 * point.frozen
    assert not footprint(point, hardware()).host
    cached = footprint(replace(point, cached=True), hardware())
    assert cached.host == {"cache": 8 * 2 * point.frozen}


def test_drives_add_up_and_the_link_reaches_what_others_do() -> None:
    cluster = hardware()
    server = nominal(100e9, 12, cluster)
    assert server.disk_read_bytes_per_s == pytest.approx(78e9)
    assert server.disk_write_bytes_per_s == pytest.approx(40.8e9)
    assert server.link_bytes_per_s == pytest.approx(0.8 * 12.5e9)


def test_both_slow_links_are_predicted_and_nothing_is_fitted_to_them() -> None:
    comparisons = compared("speed")
    assert {record.cell.inter_bandwidth_bits_per_s for record, _ in comparisons} == {5e6, 20e6}
    for _, comparison in comparisons:
        assert abs(comparison.relative_error) < 0.1


def slow() -> tuple[Workload, Hardware, Server]:
    """A link that all waits for."""
    cluster = hardware(1e9, nodes=2, ranks_per_node=1)
    return workload("luwu"), cluster, like(cluster)


def test_a_step_is_as_long_however_many_workers_there_are_but_ranks_share_a_nodes_link() -> None:
    point, cluster, server = slow()
    few = predict(point, cluster, server).step_seconds
    assert predict(point, replace(cluster, nodes=32), server).step_seconds == pytest.approx(few)
    fast = replace(server, link_bytes_per_s=1e12)
    alone = predict(point, cluster, fast).step_seconds
    shared = predict(point, replace(cluster, ranks_per_node=4), fast).step_seconds
    assert shared > 3 * alone


def test_the_optimizer_hides_behind_backward_until_the_drives_are_slower_than_links() -> None:
    point, cluster, server = slow()
    usual = predict(point, cluster, server)
    slower = predict(point, cluster, replace(server, disk_write_bytes_per_s=1e9))
    assert slower.step_seconds < 1.1 * usual.step_seconds
    slowest = predict(point, cluster, replace(server, disk_write_bytes_per_s=1e7))
    written = (slowest.link_bytes or {})["server file_written"] / 1e7
    assert slowest.step_seconds >= written
    assert slowest.bottleneck == "server_disk"
