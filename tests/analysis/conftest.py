from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest

from analysis.compare.baseline import compare
from experiments.records.record import Record
from tests.analysis import made_up


def write_records(records: Iterable[Record], path: Path) -> Path:
    path.write_text("".join(f"{record.model_dump_json()}\n" for record in records), "utf-8")
    return path


@pytest.fixture(scope="session")
def records() -> list[Record]:
    return made_up.records()


@pytest.fixture(scope="session")
def compared(records: list[Record]) -> pd.DataFrame:
    return compare(records)


@pytest.fixture
def records_file(records: list[Record], tmp_path: Path) -> Path:
    return write_records(records, tmp_path / "records.jsonl")
