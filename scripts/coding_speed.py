"""Speed of exact coding: bytes of a shard that one core writes and reads per second.

python -m scripts.coding_speed    measure and write the record, for scripts.readme

Weights are drawn from N(0, 0.02²) and moved as by AdamW at a learning rate; gradients differ in
magnitude from row to row. Times are CPU time of one thread, without other work's.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from analysis import text
from experiments.records import provenance
from fcdp.delta import message
from fcdp.delta.difference import Coding

RECORD = Path(__file__).resolve().parent.parent / "results" / "coding-speed" / "record.json"
ELEMENTS, ROUNDS = 2**22, 15
RATES = (3e-5, 1e-5, 1e-6, 0.0)


def cases(elements: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None, Coding]]:
    """Name, new shard, the version before it and coding of each case."""
    torch.manual_seed(0)
    weights, steps = 0.02 * torch.randn(elements), torch.randn(elements).clamp_(-2, 2) / 2
    for rate in RATES:
        new, base = (weights - rate * steps).bfloat16(), weights.bfloat16()
        yield f"bf16 after a step at {rate:g}, packed", new, base, "packed"
        yield f"bf16 after a step at {rate:g}, entropy", new, base, "entropy"
    rows = torch.randn(elements // 1024, 1024) * torch.rand(elements // 1024, 1).exp2()
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        yield f"{name} gradients, exponents", rows.view(-1).to(dtype), None, "packed"


def measured(elements: int = ELEMENTS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Bits per element, and gigabytes of a shard per second of a core, quartiles over rounds."""
    speeds: defaultdict[tuple[str, float], list[list[float]]] = defaultdict(list)
    for _ in range(rounds):
        for name, new, base, coding in cases(elements):
            version = message.ALONE if base is None else 1
            encoded, written = _timed(lambda: message.write(new, base, version, coding=coding))  # noqa: B023
            row, copied = _timed((new if base is None else base).clone)
            _, read = _timed(lambda: message.read(encoded, row, version))  # noqa: B023
            assert torch.equal(row, new), name
            taken = (written, read, copied)
            speeds[name, round(8 * encoded.numel() / elements, 2)].append(
                [new.nbytes / seconds / 1e9 for seconds in taken]
            )
    return {
        "command": "python -m scripts.coding_speed",
        "date": date.today().isoformat(),
        "machine": f"a core of {provenance.gather().hardware['cpu']}",
        "load": round(os.getloadavg()[0]),
        "torch": torch.__version__,
        "elements": elements,
        "rounds": rounds,
        "rows": [
            {"case": name, "bits": bits, "gb_per_s": [*map(quantiles, zip(*samples, strict=True))]}
            for (name, bits), samples in speeds.items()
        ],
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.thread_time()
    return call(), time.thread_time() - begun


def table(record: dict[str, Any]) -> str:
    """The table of the page, as Markdown."""
    rows = [
        (
            row["case"],
            f"{row['bits']:.2f}",
            *("{1:.2f} ({0:.2f}–{2:.2f})".format(*each) for each in row["gb_per_s"]),
        )
        for row in record["rows"]
    ]
    made = (
        f"Made by `{record['command']}` on {record['date']}: {record['machine']} at a load of "
        f"{record['load']}, torch {record['torch']}; {record['rounds']} rounds of "
        f"{record['elements']:,} elements, medians and quartiles."
    )
    head = ("Shard and coding", "Bits per element", "Written, GB/s", "Read, GB/s", "Copied, GB/s")
    return made + "\n\n" + text.table(head, rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record := measured(), indent=1) + "\n", encoding="utf-8")
    print(table(record))
