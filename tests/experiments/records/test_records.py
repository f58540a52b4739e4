"""The file of records survives kills, full disks, strange text; repetitions count as one cell."""

import gzip
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.load.table import latest
from experiments.records import select
from experiments.records.comparison import pooled
from experiments.records.record import Machine, Record
from experiments.records.record import read as read_records
from experiments.records.select import FILE
from simulation import files
from tests.experiments.stand_in import cell, record
from tests.programs import RESULTS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / FILE


@given(st.integers(0, 10**6))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_torn_last_line_costs_only_itself(file: Path, cut: int) -> None:
    file.unlink(missing_ok=True)
    first, second = record(cell(seed=1)), record(cell(seed=2), "failed", "an error: ü – ×")
    files.append(first, file)
    whole = file.read_bytes()
    line = second.model_dump_json().encode()
    # Any cut, also within a character of several bytes.
    file.write_bytes(whole + line[: cut % len(line)])
    assert read_records(file) == [first]
    files.append(second, file)
    assert read_records(file) == [first, second]


@given(st.text())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_error_text_stays_one_line(file: Path, text: str) -> None:
    file.unlink(missing_ok=True)
    written = record(cell(), "failed", text + "\u2028\x85\x1c\r\n")
    files.append(written, file)
    assert file.read_bytes().count(b"\n") == 1
    cleaned = files._CONTROL.sub("�", str(written.error))  # what a terminal would obey
    assert read_records(file) == [written.model_copy(update={"error": cleaned})]


def test_a_diverged_loss_is_read_back_as_such(file: Path) -> None:
    files.append(record(cell(), losses=[5.5, math.inf, math.nan]), file)
    line = file.read_text()
    # Standard JSON, so that other programs can read the file too.
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (again,) = read_records(file)
    assert again.measurement.losses[1] == math.inf
    assert math.isnan(again.measurement.losses[2])


def test_a_malformed_record_has_one_short_message(file: Path) -> None:
    file.write_text(json.dumps({"cell": ["x" * 10**5] * 3, "error": {}}) + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:1: not a record of this") as error:
        read_records(file)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("depth", [30, 10**5])
def test_a_record_that_is_nested_without_end_is_named(file: Path, depth: int) -> None:
    files.append(record(cell()), file)
    bomb = "[" * depth + "]" * depth
    with file.open("a") as text:
        text.write(file.read_text().replace('"hardware":{', f'"hardware":{{"bomb":{bomb},'))
    with pytest.raises(ValueError, match=r"records\.jsonl:2: not a record.*nested"):
        read_records(file)


@pytest.mark.parametrize("wrong", ["../../victim", "/etc", "fcdp"])
def test_an_id_that_is_not_its_cells_is_refused(file: Path, wrong: str) -> None:
    files.append(record(cell(seed=1)), file)
    files.append(record(cell(seed=2)).model_copy(update={"cell_id": wrong}), file)
    with pytest.raises(ValueError, match=r"records\.jsonl:2: cell_id = ") as error:
        read_records(file)
    assert cell(seed=2).id in str(error.value)


def test_a_cell_has_one_record_of_a_kind(file: Path) -> None:
    simulated = record(cell()).model_copy(update={"evidence": "simulated"})
    for each in (record(cell()), simulated, record(cell())):
        files.append(each, file)
    with pytest.raises(ValueError, match=r"records\.jsonl:3: .* has a record already, in line 1"):
        read_records(file)


def long_records() -> list[Record]:
    return [record(cell(seed=seed), losses=[seed / 3] * 6000) for seed in range(3)]


def test_a_long_file_is_compressed_and_read_and_appended_to_as_any_other(tmp_path: Path) -> None:
    file, written = tmp_path / "a" / FILE, long_records()
    files.write(written, file)
    content = file.read_bytes()
    assert len(content) > files.LONGEST
    compressed = files.compress(file)
    assert [*file.parent.iterdir()] == [compressed]
    assert gzip.decompress(compressed.read_bytes()) == content
    assert read_records(file) == read_records(compressed) == written
    assert select.files(file) == select.files(file.parent) == select.files(tmp_path) == [compressed]
    files.append(record(cell(seed=9)), file)
    assert [*file.parent.iterdir()] == [file]
    assert read_records(file) == [*written, record(cell(seed=9))]


def test_the_same_records_are_the_same_bytes_whatever_the_day_and_the_folder(
    tmp_path: Path,
) -> None:
    packed = []
    for name in ("a", "b"):
        files.write(long_records(), tmp_path / name / FILE)
        os.utime(tmp_path / name / FILE, (0, 0) if name == "a" else None)
        packed.append(files.compress(tmp_path / name / FILE).read_bytes())
    assert packed[0] == packed[1]
    assert packed[0][3:8] == bytes(5), "neither a name nor a time"


def test_records_in_place_of_compressed_ones_leave_one_form(file: Path) -> None:
    short = [record(cell())]
    for put in (
        lambda: files.write(short, file),
        lambda: file.write_bytes(short[0].model_dump_json().encode() + b"\n"),  # as cp does
    ):
        files.write(long_records(), file)
        files.compress(file)
        put()
        assert files.compress(file) == file
        assert [*file.parent.iterdir()] == [file]
        assert read_records(file) == short


def test_a_compressed_file_that_is_cut_short_is_named(file: Path) -> None:
    files.write(long_records(), file)
    compressed = files.compress(file)
    compressed.write_bytes(compressed.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"records\.jsonl\.gz: cannot be decompressed"):
        read_records(file)


def test_committed_records_are_compressed_where_they_are_long() -> None:
    there = sorted(RESULTS.rglob("*.jsonl*"))
    assert [file for file in there if files.stored(file) != file] == []
    plain = [file for file in there if file.suffix == ".jsonl"]
    assert [file for file in plain if file.stat().st_size > files.LONGEST] == []


def test_repetitions_are_one_record_with_all_steps_and_the_mean_of_phases() -> None:
    ours = [
        record(cell(repeat=number), step_seconds=seconds, phase_seconds={"forward": 1.0 + number})
        for number, seconds in enumerate(([1.0, 1.1], [3.0]))
    ]
    assert ours[1].cell_id == f"{ours[0].cell_id}-r2", "each is a cell of its own"
    theirs = record(cell(policy="disk"))
    merged, single = pooled([ours[0], theirs, ours[1]])
    assert merged.measurement.step_seconds == [1.0, 1.1, 3.0]
    assert merged.measurement.phase_seconds == {"forward": 1.5}
    assert (merged.cell, merged.cell_id, merged.seconds) == (ours[0].cell, ours[0].cell_id, 24.0)
    assert single == theirs
    assert [of.cell_id for of in latest([*ours, theirs])] == [merged.cell_id, single.cell_id]


def test_a_repetition_that_failed_does_not_take_the_others_along() -> None:
    failed = record(cell(repeat=0), "failed", "an error")
    ran = record(cell(repeat=1), step_seconds=[1.0])
    busy = Machine(load=0.1, cores=2, steal_share=0.4)
    (merged,) = pooled([failed, ran.model_copy(update={"machine": busy})])
    assert (merged.state, merged.cell_id, merged.machine) == ("ok", failed.cell_id, busy)


def test_a_round_that_had_not_ended_is_left_out_between_repetitions() -> None:
    ran = [
        record(cell(repeat=number), step_seconds=[1.0, 3.0, 100.0], steps_per_round=2)
        for number in range(2)
    ]
    (merged,) = pooled(ran)
    assert merged.measurement.round_seconds == [2.0, 2.0]


def test_a_busy_machine_says_so() -> None:
    machines = [
        Machine(load=load, cores=2, steal_share=steal)
        for load, steal in ((0.9, 0.01), (1.5, 0.0), (0.0, 0.31))
    ]
    stolen = "31% of the processors' time taken by its host"
    assert [each.why_busy for each in machines] == [None, "a load of 1.5 on 2 cores", stolen]
