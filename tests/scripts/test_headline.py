"""README's table beside rivals, and FCDP's parts, of made-up records; one record, one verdict."""

import re
from itertools import pairwise

from analysis.compare import rivals
from experiments.matrix import reader
from experiments.records.comparison import once
from experiments.records.record import Record
from scripts import headline
from tests.analysis.compare.test_rivals import ran
from tests.programs import ROOT

PARTS = [
    ran("fcdp", 8.0, policy="none", exchanges="flat"),
    ran("fcdp", 4.0, policy="none", exchanges="undeferred"),
    ran("fcdp-sched", 2.0, exchanges="undeferred"),
    ran("fcdp-sched", 1.0),
    ran("fcdp", 0.5),
    ran("fcdp", 0.25, gather_codec="delta", reduce_codec="exact"),
]


def with_rivals(hsdp: float) -> list[Record]:
    seconds = {"fcdp": 1.0, "zeropp": 0.1, "deepspeed-zero3": 3.0, "fsdp2": 4.0, "zero3": 2.0}
    both = [
        [ran(name, of, accumulation=count) for name, of in (seconds | {"fsdp2-hsdp": each}).items()]
        for count, each in ((1, hsdp), (4, 1.5))
    ]
    return [record for group in both for record in group]


def rows(table: str) -> dict[str, list[str]]:
    lines = (line.strip("| ").split(" | ") for line in table.splitlines() if line[:2] == "| ")
    return {name: cells for name, *cells in lines}


def says_the_same(table: str, sentence: str) -> bool:
    """Whether the sentence names the columns in which the table has a rival ahead, and no other."""
    shown, (ahead, _) = rows(table), sentence.split(" Not faster: ")
    best = zip(shown["Strategy"], shown["FCDP over the best exact rival"], strict=True)
    decided = [(of, cell) for of, cell in best if not cell.startswith("1.0×")]
    return all((f"{of}: " in ahead) == cell.startswith("0.") for of, cell in decided)


def test_the_fastest_exact_strategy_stands_first() -> None:
    order = ["FCDP", "`fsdp2-hsdp`", "`zero3`", "DeepSpeed ZeRO-3", "FSDP2", "`zeropp`"]
    assert [*rows(headline.result(with_rivals(1.5)))][1:7] == order
    order[:2] = order[1::-1]
    assert [*rows(headline.result(with_rivals(0.25)))][1:7] == order


def test_speed_ups_are_over_the_best_exact_rival_and_the_old_ones() -> None:
    shown = rows(headline.result(with_rivals(0.5)))
    assert shown["FCDP over the best exact rival"] == [
        "0.50×, `fsdp2-hsdp`",
        "1.5×, `fsdp2-hsdp`",
    ]
    assert [cells[0][:4] for cells in [*shown.values()][8:]] == ["0.50", "2.0×", "3.0×", "6.00"]
    assert [*shown][8:] == [*headline._OVER, "ZeRO-3 sends at least"]


def test_on_one_gpu_a_cell_says_its_link_and_its_share_of_the_card_and_no_rehearsal_is_shown() -> (
    None
):
    given = {"dtype": "bfloat16", "inter_bandwidth_bits_per_s": 5 * 10**9}
    there = [ran(name, 1.0, **given) for name in ("fcdp", "fsdp2-hsdp")]
    assert headline.on_one_gpu(there) == headline.memory_on_one_gpu(there) == ""
    card = {"gpu": "NVIDIA H200", "gpus": 1}
    there = [record.model_copy(update={"hardware": card}) for record in there]
    table = headline.on_one_gpu(there)
    assert "(NVIDIA H200), which 2 nodes × 2 ranks share" in table
    shown = rows(table)
    assert [*shown] == ["Strategy", "FCDP", "`fsdp2-hsdp`"]
    assert shown["Strategy"] == ["full, k\u00a0=\u00a01, 5 Gbit/s"]
    assert re.fullmatch(r"1.00 s, [\d.]+ MB, \d+%", shown["FCDP"][0])
    of_memory = rows(headline.memory_on_one_gpu(there))
    assert of_memory["FCDP"][0] == shown["Strategy"][0]


def test_a_part_is_beside_the_step_without_it() -> None:
    table = rows(headline.parts(PARTS))
    assert [*table][1:] == [*headline._PARTS.values()]
    seconds = [cells[0].split(", ")[0] for cells in table.values()][1:]
    assert [float(before) / float(after) for before, after in pairwise(seconds)] > [1.9] * 5
    assert ["2.0×" in cells[0] for cells in table.values()] == [False, False, *[True] * 5]


def test_the_matrix_runs_each_part() -> None:
    running = reader.read("parts").running
    assert {cell.subject for cell in running} == {*headline._PARTS}
    assert {cell.subject for cell in running} == {record.cell.subject for record in PARTS}


def test_headline_runs_each_cell_in_fifteen_rounds_and_both_orders() -> None:
    running = reader.read("headline").running
    order = [once(cell).id for cell in running]
    half = len(order) // 2
    assert order[half:] == order[:half][::-1]
    assert {cell.steps * 2 >= 15 for cell in running} == {True}
    subjects = {cell.subject for cell in running}
    exact = {"pipeline", "fsdp2-hsdp-offload", "fsdp2-hierarchical", "zero3", "fsdp2-hsdp"}
    assert exact | {"deepspeed-zero3", "fsdp2", "zeropp", *list(headline._PARTS)[-2:]} == subjects


def test_table_and_sentence_are_of_one_record() -> None:
    for seconds in (0.5, 1.5):
        records = with_rivals(seconds)
        assert says_the_same(headline.result(records), rivals.in_words(records))
    ahead, behind = with_rivals(0.5), with_rivals(1.5)
    assert not says_the_same(headline.result(ahead), rivals.in_words(behind))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table, sentence = (
        re.findall(f"<!-- {name}: .*? -->\n(.*?)<!-- end", page, re.DOTALL)[0]
        for name in ("result", "rivals")
    )
    assert says_the_same(table, sentence)
    assert sentence.strip() in (ROOT / "REPRODUCTION.md").read_text(encoding="utf-8")
