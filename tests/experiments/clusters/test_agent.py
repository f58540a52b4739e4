"""Files that a node gets for a launch."""

from pathlib import Path

import pytest

from experiments.clusters.interface import Launch
from experiments.clusters.launch import Node
from experiments.clusters.node import Order, _arguments


def order(*arguments: str, files: dict[str, str]) -> Order:
    return Order(
        node=Node(node=1, nodes=2, ranks_per_node=1, master_address="", port=29500, environment={}),
        address="127.0.0.1",
        launch=Launch(entry="tests:none", arguments=arguments, logs=Path("logs"), timeout_s=1.0),
        files=files,
        marker="marker",
    )


@pytest.mark.parametrize("there", [None, b"of an earlier run", b"\xff"])
def test_ranks_read_what_the_runner_sent_and_no_older_file(
    there: bytes | None, tmp_path: Path
) -> None:
    cell = tmp_path / "cell.json"
    if there is not None:
        cell.write_bytes(there)
    found = _arguments(order(str(cell), "text", files={str(cell): "of this run, é"}), tmp_path)
    assert found[1] == "text"
    assert Path(found[0]).read_text(encoding="utf-8") == "of this run, é"
    assert found[0] != str(cell)


def test_a_file_that_is_the_runners_own_is_read_where_it_is(tmp_path: Path) -> None:
    cell = tmp_path / "cell.json"
    cell.write_text("of this run", encoding="utf-8")
    given = order(str(cell), files={str(cell): "of this run"})
    assert _arguments(given, tmp_path) == (str(cell),)
