from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from analysis.__main__ import RESULTS, app
from analysis.compare.baseline import compare
from analysis.load import runs
from experiments.records.record import Record
from tests.analysis import made_up


def write_records(records: Iterable[Record], path: Path) -> Path:
    path.write_text("".join(f"{record.model_dump_json()}\n" for record in records), "utf-8")
    return path


def called(*words: object, status: int = 0) -> Result:
    """Call the command line, which must end with this status."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="session")
def committed() -> list[runs.AnyRun]:
    """All committed runs, and the studies."""
    return runs.load(RESULTS)


@pytest.fixture(scope="session")
def records() -> list[Record]:
    return made_up.records()


@pytest.fixture(scope="session")
def compared(records: list[Record]) -> pd.DataFrame:
    return compare(records)
