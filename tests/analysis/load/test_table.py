"""Records as one table, and the names that matrices' files say."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.load import matrices
from analysis.load.provenance import provenance
from analysis.load.runs import of_memory
from analysis.load.table import frame, load, write_parquet
from experiments.matrix import files
from experiments.records.cell import ClusterSpec
from experiments.records.record import Machine, Record
from tests.analysis import made_up
from tests.analysis.conftest import write_records
from tests.simulation.imitated.small import case, settled


def test_parquet_holds_the_same_table(compared: pd.DataFrame, tmp_path: Path) -> None:
    write_parquet(compared, tmp_path / "cells.parquet")
    read = pd.read_parquet(tmp_path / "cells.parquet")
    assert list(read.columns) == list(compared.columns)
    assert list(read["cell"]) == list(compared["cell"])
    assert read["speed_up"].equals(compared["speed_up"])


def test_cores_of_nodes_are_said_and_older_records_shared_them() -> None:
    def of(cores: str) -> Record:
        cluster = ClusterSpec(nodes=2, ranks_per_node=2, cores=cores)
        machine = Machine(load=0.0, cores=5, steal_share=0.0)
        return made_up.record(made_up.cell("fcdp", cluster=cluster), machine=machine)

    older = of("shared").model_dump(mode="json")
    del older["cell"]["cluster"]["cores"]
    assert Record.model_validate(older) == of("shared")
    table = frame([of("shared"), of("own")])
    assert "· 2 nodes × 2 ranks, emulated ·" in provenance(table[:1])
    assert "· 2 nodes × 2 ranks, 2 cores per node, emulated ·" in provenance(table[1:])
    # A cell that was left out was on no machine.
    own = ClusterSpec(nodes=2, ranks_per_node=2, cores="own")
    skipped = made_up.record(
        made_up.cell("zero3", cluster=own), state="skipped", error="x", measurement=None
    )
    table = frame([of("own"), skipped])
    assert "· 2 nodes × 2 ranks, 2 cores per node, emulated ·" in provenance(table)
    assert "· 2 nodes × 2 ranks, emulated ·" in provenance(table[1:])


def test_a_directory_is_searched_but_not_what_a_run_keeps_beside_its_records(
    tmp_path: Path, records: list[Record]
) -> None:
    with pytest.raises(ValueError, match="no records"):
        load(tmp_path)
    run = tmp_path / "run"
    for part in ("cells/a", "earlier/2026", "wandb"):
        (run / part).mkdir(parents=True)
        (run / part / "progress.jsonl").write_text("not a record\n")
    write_records(records[:2], run / "records.jsonl")
    assert load(tmp_path) == records[:2]


def test_a_matrix_without_a_file_may_have_any_strategy_and_models_of_its_own() -> None:
    assert list(matrices.named()) == files.available()
    (strategies,) = matrices.names("memory").values()
    assert all(of["strategy"] <= strategies for of in matrices.named().values())


def test_of_a_case_that_was_settled_again_the_last_record_counts() -> None:
    first = settled(case("fcdp"), 8)
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    assert of_memory("memory.jsonl", [later, first]).records == [later]
