"""Instances that clouds rent out, with prices and where these are from; or nodes of one's own."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from simulation.compute import with_rates
from simulation.files import Strict, problem
from simulation.hardware import Hardware, cluster, gpu, reported
from simulation.yaml_lines import load

TABLE = Path(__file__).parents[1] / "results" / "instances" / "instances.csv"
#: The table of public clouds, in place of a file.
ALL = "all"
_GIB = 2**30
#: Where the source says nothing: too little for what keeps state or a cache in host memory.
_HOST_MEMORY_BYTES = 1e9


class Instance(Strict):
    """A line of the table. What its source does not say is empty."""

    provider: str
    instance: str
    gpu: str
    gpus: int = Field(ge=1)
    #: Nominal bandwidth to other nodes; without it only one node is planned.
    nic_gbit_s: float | None = Field(default=None, gt=0)
    host_memory_gib: float | None = Field(default=None, gt=0)
    list_usd_per_hour: float | None = Field(default=None, ge=0)
    spot_usd_per_hour: float | None = Field(default=None, ge=0)
    #: When the prices were so, and who says it.
    as_of: str = ""
    source: str = ""
    note: str = ""
    #: Most nodes that there are.
    nodes: int = Field(default=64, ge=1)

    @property
    def most_nodes(self) -> int:
        """Most nodes that can be planned."""
        return 1 if self.nic_gbit_s is None else self.nodes

    def cluster(self, nodes: int) -> Hardware:
        """So many of them, by data sheets, fitted rates and what cards report."""
        memory = self.host_memory_gib
        return with_rates(
            reported(
                cluster(
                    self.gpu,
                    nodes=nodes,
                    ranks_per_node=self.gpus,
                    inter_bits_per_s=float("inf") if nodes == 1 else 1e9 * (self.nic_gbit_s or 0),
                    host_memory_bytes=_HOST_MEMORY_BYTES if memory is None else memory * _GIB,
                )
            )
        )


def read(source: str | Path) -> list[Instance]:
    """The table (``all``), a CSV file of its form, or a YAML file with a list of such mappings.

    Raises ``ValueError`` naming the file, the line and the field.
    """
    path = TABLE if source == ALL else Path(source)
    if not path.is_file():
        raise ValueError(f"instances = {str(source)!r}: allowed are {ALL}, and a CSV or YAML file")
    lines = _of_yaml(path) if path.suffix in (".yaml", ".yml") else _of_csv(path)
    return [_instance(where, values) for where, values in lines]


def named(name: str, source: str | Path = ALL) -> Instance:
    """The instance of that name, of several providers the first. ``ValueError`` for no such."""
    found = read(source)
    for one in found:
        if one.instance == name:
            return one
    names = ", ".join(sorted({one.instance for one in found}))
    raise ValueError(f"instance = {name!r}: allowed are {names}")


def _instance(where: str, values: Any) -> Instance:
    try:
        found = Instance.model_validate(values)
        gpu(found.gpu)
    except ValueError as error:
        raise ValueError(f"{where}: {problem(error)}") from error
    return found


def _of_csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            yield f"{path}:{number}", {key: value for key, value in line.items() if value}


def _of_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    document = load(path)
    if not isinstance(document.values, list):
        document.fail((), "must be a list of instances")
    for index, values in enumerate(document.values):
        yield document.place((index,)), values
