"""The table of instances, and files of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulation.planner.rent import ALL, read

YAML = """\
- provider: ours
  instance: node
  gpu: a40
  gpus: 8
  nic_gbit_s: 10
  nodes: 4
  list_usd_per_hour: 4
"""


def test_each_row_has_a_source_and_a_date() -> None:
    rows = read(ALL)
    assert len({(row.provider, row.instance) for row in rows}) == len(rows)
    for row in rows:
        assert row.source.startswith("https://")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.as_of)
        assert row.cluster(1).world_size == row.gpus
        assert row.list_usd_per_hour or row.spot_usd_per_hour


def test_what_the_source_does_not_say_is_not_planned() -> None:
    (lambda_h100,) = (row for row in read(ALL) if row.instance == "8x H100 SXM")
    assert lambda_h100.most_nodes == 1
    (p5,) = (row for row in read(ALL) if row.instance == "p5.48xlarge")
    assert p5.cluster(2).inter_bytes_per_s == pytest.approx(0.8 * 3.2e12 / 8)


def test_nodes_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(YAML)
    (node,) = read(file)
    assert (node.most_nodes, node.cluster(4).world_size) == (4, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML.replace("a40", "a41"), "ours.yaml:1: .*gpu = 'a41': allowed are a40"),
        (YAML.replace("gpus: 8", "gpus: 0"), "ours.yaml:1: .*gpus: Input should be greater"),
        (YAML + "  colour: red\n", "colour: Extra inputs are not permitted"),
        ("provider: ours\n", "must be a list of instances"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(file)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="instances = 'nosuch': allowed are all, and a CSV"):
        read("nosuch")
