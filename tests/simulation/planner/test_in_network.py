"""LuWu is offered beside a plan where there is a server; without one the plan stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from simulation.luwu import nominal
from simulation.models import shape
from simulation.planner import report
from simulation.planner.plan import plan, refusal
from simulation.planner.request import Request
from simulation.planner.siblings import in_network, lack
from tests.simulation.planner.made_up import config_file, request

KINDS = ("fsdp2", "fcdp")


def with_server(asked: Request) -> Request:
    return replace(asked, server=nominal(100e9, 12, asked.hardware))


def small(directory: Path) -> Request:
    return request(str(config_file(directory)), strategies=KINDS)


def test_without_a_server_it_is_not_offered(tmp_path: Path) -> None:
    found = plan(small(tmp_path))
    assert found is not None
    assert found.in_network is None
    assert "luwu" not in report.document(found)


def test_with_one_the_rest_of_the_plan_stays(tmp_path: Path) -> None:
    asked = small(tmp_path)
    without, found = plan(asked), plan(with_server(asked))
    assert without is not None
    assert found is not None
    assert found.in_network is not None
    assert report.rows(found) == report.rows(without)
    document = report.document(found)
    offered = document.pop("luwu")
    assert document == report.document(without)
    parameters = shape(asked.model, found.in_network.length).parameters
    assert offered["server_sent"] == 4 * parameters
    assert offered["node_sent"] == 8 * 2 * parameters
    assert offered["files_bytes"] == 28 * parameters
    assert "a switch that sums and multicasts" in str(found.in_network)


def test_it_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    asked = with_server(replace(small(tmp_path), global_batch=64))
    found = in_network(asked)
    assert found is not None
    assert found.sequences == 2


def test_where_nothing_else_fits_it_is_named() -> None:
    asked = request(nodes=1, strategies=("fsdp2",), sequence_lengths=(512,))
    offered = in_network(with_server(asked))
    assert offered is not None
    assert refusal(with_server(asked)).endswith(f"or {offered}")
    assert "luwu" not in refusal(asked)


def test_four_bits_are_not_its(tmp_path: Path) -> None:
    asked = request(
        str(config_file(tmp_path)), strategies=("ddp",), lora_rank=8, frozen_dtype="nf4"
    )
    assert in_network(with_server(asked)) is None
    # In words, and not as a lack of memory, which nobody has looked for.
    found = plan(with_server(asked))
    assert found is not None
    assert report.document(found)["luwu_lacks"] == "luwu does not hold frozen parameters in nf4"


def test_a_batch_that_does_not_fit_is_named(tmp_path: Path) -> None:
    asked = with_server(replace(small(tmp_path), micro_batches=(10**6,)))
    assert in_network(asked) is None
    assert "activations of 1000000 sequences" in lack(asked)


def test_adapters_keep_their_base_in_host_memory(tmp_path: Path) -> None:
    asked = request(str(config_file(tmp_path)), strategies=KINDS, lora_rank=8)
    found = in_network(with_server(asked))
    assert found is not None
    assert found.cached
    assert found.host_bytes > 0
