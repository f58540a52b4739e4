"""Draws docs/figures/differences.svg: bits per parameter of gathers by learning rate."""

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure

from analysis.figures.drawings import canvas, put_source
from analysis.load.table import frame, latest, load

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "delta" / "records.jsonl"
#: Bits of entropy codes, measured by examples/differences/bits.py.
BITS = ROOT / "results" / "difference-bits" / "record.json"


def bits(records: Path = RECORDS) -> Mapping[float, float]:
    """Bits per parameter that crossed nodes in gathers, headers included, by learning rate.

    Bytes of the ledger but for reductions, times the overhead of protocols on the whole step: the
    kernel's count over the ledger's.
    """
    by_rate = {}
    for record in latest(load(records)):
        settings = record.cell.settings.model_dump()
        unshaped = record.cell.inter_bandwidth_bits_per_s is None
        exact = settings.get("reduce_codec") == "none"
        always = settings.get("gather_codec") == "delta(always)"
        measured = record.measurement
        if measured is None or not (unshaped and exact and always):
            continue
        assert measured.ledger_bytes_per_step is not None
        ledger = measured.ledger_bytes_per_step["inter_node"]
        overhead = measured.inter_node_bytes_per_step / sum(ledger.values())
        gathered = overhead * (sum(ledger.values()) - ledger["reduce"])
        nodes = record.cell.cluster.nodes
        crossing = (nodes - 1) / nodes * measured.parameters
        by_rate[record.cell.learning_rate] = 8 * gathered / crossing
    return dict(sorted(by_rate.items()))


def draw() -> Figure:
    """Bits sent per parameter by both codings, beside those of a whole bf16 gather."""
    records = frame(latest(load(RECORDS)))
    both = sorted(json.loads(BITS.read_bytes())["rows"], key=itemgetter("learning_rate"))
    smaller = min(row["parameters"] for row in both)  # that of the records
    rows = [row for row in both if row["parameters"] == smaller]
    coded, entropy = (
        {row["learning_rate"]: row[name][1] for row in rows} for name in ("gathers", "entropy")
    )
    with canvas(5.2, 3.0) as (figure, ((ax,),)):
        ax.axhline(16, linestyle="--", color="0.5", label="whole")
        for series, label, place in ((bits(), "packed", 6), (coded, "entropy codes", -13)):
            ax.plot(list(series), list(series.values()), marker="o", label=label)
            for rate, count in series.items():
                offset = {"xytext": (0, place), "textcoords": "offset points", "ha": "center"}
                ax.annotate(f"{count:.2g}", (rate, count), **offset)
        ax.plot(list(entropy), list(entropy.values()), ":", color="0.2", label="their entropy")
        ax.set(
            xscale="log",
            yscale="log",
            xlabel="learning rate of AdamW",
            ylabel="bits per parameter",
            ylim=(0.1, 25),
        )
        ax.yaxis.set_major_formatter("{x:g}")
        ax.legend(loc="lower right")
        put_source(figure, records, "")
    return figure
