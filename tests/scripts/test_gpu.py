"""The command for a machine with a GPU: all of it on the CPU, and how it judges what it finds."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.preflight.schema import Preflight
from scripts.gpu import __main__ as command
from scripts.gpu import constants, cost, marked, parity, ranks
from scripts.gpu.parity import Case
from scripts.gpu.ranks import Rank
from scripts.gpu.records import Brief, Record

ROOT = Path(__file__).resolve().parents[2]
#: What is committed stays small.
MOST_FILES, MOST_BYTES = 7, 4 * 2**20


def verdicts(record: Record) -> dict[str, str]:
    return {check.name: check.verdict for check in record.checks}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of one run on the CPU, at the smallest size."""
    folder = tmp_path_factory.mktemp("gpu")
    line = [sys.executable, "-m", "scripts.gpu", "--device", "cpu", "--out", str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in command.PARTS:
        assert f"\n{name}" in done.stdout
    return folder


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


@pytest.mark.system
def test_on_the_cpu_every_part_runs(out: Path) -> None:
    summary = read(out / command.SUMMARY)
    assert summary["evidence"] == "measured"
    assert summary["device"] == "cpu"
    assert [part["part"] for part in summary["parts"]] == list(command.PARTS)
    assert {part["verdict"] for part in summary["parts"]} == {"passed"}
    assert summary["commit"]
    assert "torch" in summary["versions"]


@pytest.mark.system
def test_the_records_are_few_and_small(out: Path) -> None:
    files = list(out.iterdir())
    assert len(files) <= MOST_FILES
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


@pytest.mark.system
def test_parity_holds_in_both_worlds(out: Path) -> None:
    details = read(out / "correctness.json")["details"]
    for world in (parity.IMITATED, parity.PAIR):
        cases = details[world.name]["cases"]
        assert list(cases) == [case.name for case in parity.policies(small=True)]
        assert all(line["equal"] for line in cases.values())


@pytest.mark.system
def test_what_a_cpu_cannot_tell_is_said_and_no_figure(out: Path) -> None:
    found = read(out / "memory.json")
    assert found["figures"] == {}
    assert [c["name"] for c in found["checks"] if c["verdict"] == "not measured"] == [
        "device memory"
    ]
    assert found["details"]["host"]["hits"] > 0
    ratio = {c["name"]: c["verdict"] for c in read(out / "overlap.json")["checks"]}
    assert ratio["host cache over none"] == "not measured"


@pytest.mark.system
def test_ranks_of_three_topologies_neither_hang_nor_differ(out: Path) -> None:
    details = read(out / "nccl.json")["details"]
    for world in parity.WORLDS:
        assert not details[world.name]["broken"]
        for run in details[world.name]["cases"].values():
            assert run["losses"] == pytest.approx(run["fsdp2_losses"], rel=1e-4)


@pytest.mark.system
def test_the_planner_can_read_the_constants(out: Path) -> None:
    measured = Preflight.read(out / constants.FILE)
    assert measured.compute.matmul_flops_per_s["float32"] > 0
    assert measured.links.intra_node_all_gather is not None
    assert measured.host.free_bytes > 0


@pytest.mark.system
def test_the_trace_names_what_fcdp_does(out: Path) -> None:
    events = json.loads(gzip.decompress((out / cost.TRACE).read_bytes()))["traceEvents"]
    assert any(event["name"].startswith("fcdp::cache_load") for event in events)


def test_a_part_that_fails_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(brief: Brief, record: Record, limit_s: float) -> None:
        record.passed_if(True, "the first half")
        raise RuntimeError("illegal memory access")

    def sound(brief: Brief, record: Record, limit_s: float) -> None:
        record.passed_if(limit_s > 100, "has the time that the other left", f"{limit_s}")

    parts = {"broken": command.Part(broken, 0.9), "sound": command.Part(sound, 0.1)}
    monkeypatch.setattr(command, "PARTS", parts)
    found = command.run(Brief(tmp_path, tmp_path, "cpu", True), [*parts], 480)
    assert [record.verdict for record in found] == ["failed", "passed"]
    assert "illegal memory access" in (tmp_path / "broken.json").read_text()


@pytest.mark.parametrize("arguments", [["--only", "speed"], ["--budget-s", "0"], []])
def test_wrong_arguments_are_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--out", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit) as error:
        command.main([*place, *arguments])
    assert error.value.code == 2
    assert (arguments[0] if arguments else "--out") in capsys.readouterr().err


def go_wrong(rank: Rank) -> None:
    """Fail, crash or hang on purpose."""
    rank.join(1, rank.world_size)
    rank.answer({"rank": rank.rank, "host": os.environ.get("NCCL_HOSTID")})
    fault = rank.brief["fault"] if rank.rank == 1 else "none"
    if fault == "raise":
        raise ValueError("made to fail")
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        hang()


def hang() -> None:
    while True:
        time.sleep(60)


def faulty(fault: str, limit_s: float) -> ranks.Outcome:
    brief = {"fault": fault}
    return ranks.run(go_wrong, brief, world_size=2, device="cpu", limit_s=limit_s, apart=True)


@pytest.mark.system
@pytest.mark.parametrize(("fault", "said"), [("raise", "made to fail"), ("crash", "Segmentation")])
def test_a_rank_that_dies_ends_its_group_with_its_words(fault: str, said: str) -> None:
    found = faulty(fault, 120)
    assert found.state == "died"
    assert "rank 1" in found.error
    assert said in found.error
    assert found.seconds < 100
    assert [lines[0]["host"] for lines in found.lines] == ["fcdp-0", "fcdp-1"]


@pytest.mark.system
def test_a_hang_ends_with_the_limit_and_the_stacks() -> None:
    found = faulty("hang", 15)
    assert found.state == "hung"
    assert [lines[0]["rank"] for lines in found.lines] == [0, 1]
    assert "in hang" in found.stacks[1]


def test_of_a_line_that_was_cut_off_nothing_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "0.jsonl"
    file.write_text('{"case": 1}\n{"case": ')
    assert ranks._lines(file) == [{"case": 1}]


CASES = [Case("fsdp2"), Case("none"), Case("host")]


def line(**changes: Any) -> dict[str, Any]:
    return {"equal": True, "distance": 0.0, "hits": 3, "trains": True, **changes}


def judged(
    found: parity.Lines, world: parity.World = parity.PAIR, broken: parity.Broken | None = None
) -> Record:
    record = Record("correctness")
    parity.judge(record, world, found, broken or {})
    return record


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [({}, "passed"), ({"equal": False}, "failed"), ({"hits": 0}, "failed")],
)
def test_parity_is_judged_over_all_ranks(changed: dict[str, Any], verdict: str) -> None:
    lines = {case: line() for case in CASES}
    lines[CASES[2]] = parity.together([line(), line(**changed)])
    found = verdicts(judged(lines))
    assert found.pop("host/full on 2 × 1: equal to FSDP2, bit for bit") == verdict
    assert {*found.values()} == {"passed"}


@pytest.mark.parametrize(
    ("world", "micro_batches", "equal", "distance", "verdict"),
    [
        (parity.WORLDS[1], 1, False, 9e-5, "passed"),
        (parity.WORLDS[1], 1, False, 2e-4, "failed"),
        (parity.PAIR, 2, False, 9e-5, "passed"),
        (parity.PAIR, 1, False, 9e-5, "failed"),
    ],
)
def test_only_sums_of_several_orders_may_differ(
    world: parity.World, micro_batches: int, equal: bool, distance: float, verdict: str
) -> None:
    case = Case("host", "full", None, micro_batches)
    assert judged({case: line(equal=equal, distance=distance)}, world).verdict == verdict


def test_a_case_that_broke_its_ranks_is_no_parity() -> None:
    found = {case: line() for case in CASES[:2]}
    record = judged(found, broken={CASES[2]: "hung after 9 s"})
    assert record.verdict == "failed"
    assert [check.detail for check in record.checks if "no hang" in check.name] == [
        "hung after 9 s"
    ]


def test_where_nccl_refuses_fsdp2_nothing_is_said_of_fcdp() -> None:
    record = judged({}, broken={CASES[0]: "Duplicate GPU detected"})
    assert record.verdict == "not measured"
    assert "Duplicate GPU detected" in record.checks[0].detail


def test_quantised_losses_have_a_bound() -> None:
    case = Case("none", "full", "int8")
    for distance, verdict in ((0.02, "passed"), (0.04, "failed")):
        assert judged({case: line(distance=distance)}).verdict == verdict


def test_marked_tests_are_found_by_their_mark(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_on_a_device.py").write_text(
        f"import pytest\npytestmark = {marked._MARK}"
    )
    (tmp_path / "tests/test_elsewhere.py").write_text("import pytest\n")
    assert marked.files(tmp_path) == [Path("tests/test_on_a_device.py")]
    assert Path("tests/fcdp/test_codec.py") in marked.files(ROOT)


SKIPPED = "SKIPPED [2] tests/test_a.py:3: needs a CUDA device"


@pytest.mark.parametrize(
    ("status", "said", "verdict", "detail"),
    [
        (0, "tests/test_a.py::test_b[1 x] PASSED [100%]", "passed", "1 passed"),
        (1, "tests/test_a.py::test_b FAILED\nassert 1 == 2", "failed", "assert 1 == 2"),
        (0, f"tests/test_a.py::test_b SKIPPED (needs)\n{SKIPPED}", "not measured", SKIPPED),
        (2, "E   ModuleNotFoundError: No module named 'pydantic'", "not measured", "pydantic"),
        (4, "E   ModuleNotFoundError: No module named 'pydantic'", "not measured", "pydantic"),
        (2, "E   ModuleNotFoundError: No module named 'fcdp.tiers'", "failed", "fcdp.tiers"),
        (2, "E   SyntaxError", "failed", "SyntaxError"),
        (5, "collected 0 items", "not measured", "no test was found"),
        (None, "tests/test_a.py::test_b PASSED", "failed", "did not end"),
        (-11, "tests/test_a.py::test_b PASSED\nFatal Python error", "failed", "Fatal"),
    ],
)
def test_marked_tests_are_judged_by_file(
    status: int | None, said: str, verdict: str, detail: str
) -> None:
    record = Record("correctness")
    outcomes = marked.judge(record, "a file", status, said)
    assert record.verdict == verdict
    assert detail in record.checks[0].detail
    assert len(outcomes) == said.count("::")


def peaks(**changes: float) -> dict[str, Any]:
    base = {f"{name}_peak": 1e9 for name in ("active", "allocated", "reserved")}
    return {**base, "retries": 0, "host_seconds": 0.1, "device_seconds": 1.0, **changes}


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "passed"),
        ({"reserved_peak": 1e9 + cost.allowed(10_000)}, "passed"),
        ({"reserved_peak": 1e9 + cost.allowed(10_000) + 1}, "failed"),
        ({"active_peak": 6e9}, "failed"),
        ({"retries": 1}, "failed"),
    ],
)
def test_memory_may_exceed_fsdp2_by_slices_in_flight(
    changed: dict[str, float], verdict: str
) -> None:
    record = Record("memory")
    cost.judge_memory(record, {"fsdp2": peaks(), "none": peaks(), "host": peaks(**changed)}, 10_000)
    assert record.verdict == verdict


def test_memory_says_nothing_where_the_host_was_the_slower_one() -> None:
    record = Record("memory")
    cost.judge_memory(record, {"fsdp2": peaks(host_seconds=0.9), "host": peaks()}, 10_000)
    assert record.verdict == "failed"


def test_slices_in_flight_are_a_small_part_of_the_model() -> None:
    size = cost.memory_sizes(small=False)
    assert size["units"] * 2 * size["width"] ** 2 == 24 * 200 * 10**6
    assert cost.allowed(size["width"]) < 0.6 * 200e6


def found(**changes: Any) -> dict[str, Any]:
    copies = {"bytes": 50e9, "seconds": 1, "share_under_kernels": 0.95}
    return {
        "parameters": 1,
        "hits": 1,
        "host_over_none": 1.02,
        "trace_bytes": 1000,
        "plain_copy_bytes_per_s": 52e9,
        "copies": {**copies, **{k: v for k, v in changes.items() if k in copies}},
        **{k: v for k, v in changes.items() if k not in copies},
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"host_over_none": 1.06},
        {"bytes": 40e9},
        {"share_under_kernels": 0.1},
        {"trace_bytes": 3 * 2**20},
        {"copies": None},
    ],
)
def test_overlap_is_held_against_its_targets(changed: dict[str, Any]) -> None:
    record = Record("overlap")
    cost.judge_overlap(record, found(), on_cpu=False)
    assert record.verdict == "passed"
    record = Record("overlap")
    cost.judge_overlap(record, found(**changed), on_cpu=False)
    assert record.verdict == "failed"


def event(kind: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": begin,
        "dur": length,
        "pid": 0,
        "tid": 7,
        "args": {"bytes": 100, "stream": 7, "correlation": 1},
    }


PINNED = "Memcpy HtoD (Pinned -> Device)"
EVENTS = [
    event("kernel", "gemm", 0, 10),
    event("kernel", "gemm", 5, 10),
    event("gpu_memcpy", PINNED, 10, 10),  # half of it under the second kernel
    event("gpu_memcpy", PINNED, 30, 10),  # none of it
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 10),
    event("cpu_op", "aten::mm", 0, 1),
    {"name": "not timed"},
]


def test_a_copy_counts_as_hidden_as_far_as_kernels_run_beside_it() -> None:
    copies = cost.copies(EVENTS)
    assert copies == cost.Copies(200, 20e-6, 0.25)
    assert cost.copies(EVENTS[:2]) is None
