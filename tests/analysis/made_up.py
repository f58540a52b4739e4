"""Made-up records for the tests: plausible sizes, not one of them measured."""

from typing import Any

from experiments.records.cell import Cell
from experiments.records.record import Measurement, Record
from simulation.transformer import ModelSpec
from tests.experiments import cells, stand_in

#: Strategy → tuning → MB sent a step, the closed form's share of it, and seconds without a network.
TRAFFIC: dict[str, dict[str, tuple[float, float, float]]] = {
    "deepspeed-zero3": {"full": (11.0, 0.77, 0.31), "lora": (5.2, 0.97, 0.24)},
    "fsdp2": {"full": (10.4, 0.80, 0.15), "lora": (5.1, 0.98, 0.12)},
    "fcdp": {"full": (3.3, 0.99, 0.16), "lora": (0.07, 0.96, 0.11)},
}
LINKS: tuple[int | None, ...] = (10_000_000, 100_000_000, None)
MODELS = GPT2, LLAMA = cells.model_spec("gpt2", layers=4), cells.model_spec("llama", layers=4)
ERROR = "RuntimeError: <script>alert('x')</script> & a second line\n  File \"worker.py\", line 7"


def cell(
    strategy: str,
    model: ModelSpec = GPT2,
    tuning: str = "full",
    link: int | None = None,
    **changes: Any,
) -> Cell:
    settings: dict[str, Any] = {
        "matrix": "made-up",
        "model": model,
        "tuning": tuning,
        "inter_bandwidth_bits_per_s": link,
        "sequence_length": 128,
        "micro_batch": 4,
        "dtype": "bfloat16",
        "warmup_steps": 2,
        "steps": 8,
    }
    return cells.cell(strategy, **(settings | changes))


def figures(of: Cell) -> dict[str, Any]:
    """Measurement that such a cell might have; other strategies' cells have that of FCDP's."""
    strategy = of.strategy if of.strategy in TRAFFIC else "fcdp"
    megabytes, share, compute = TRAFFIC[strategy][of.tuning]
    scale = 1.12 if of.model == LLAMA else 1.0
    sent = megabytes * 1e6 * scale * of.accumulation
    link = of.inter_bandwidth_bits_per_s or 8_000_000_000
    seconds = compute + 8 * sent / link
    lag = list(TRAFFIC).index(strategy) * 4e-4
    slope = 0.11 if of.tuning == "full" else 0.02
    ledger = {
        "inter_node": {"forward": sent * 0.45, "backward": 0.0, "reduce": sent * 0.54},
        "intra_node": {"forward": sent, "backward": sent, "reduce": sent},
    }
    return {
        "engine": "deepspeed" if strategy.startswith("deepspeed") else "torch",
        "engine_version": "0.19.6" if strategy.startswith("deepspeed") else "2.13.0",
        "policy": "host" if strategy == "fcdp" else None,
        "parameters": int(1_700_000 * scale) + (12_000 if of.tuning == "lora" else 0),
        "trainable_parameters": 12_000 if of.tuning == "lora" else int(1_700_000 * scale),
        "step_seconds": [seconds * (1 + 0.01 * wobble) for wobble in (0, 2, -1, 1, 3, -2, 4, 0)],
        "losses": [5.6 - slope * step + lag * (step % 3) for step in range(10)],
        "inter_node_bytes_per_step": sent * (1.0 if link < 1e9 else 1.004),
        "inter_node_bytes_closed_form": sent * share,
        "ledger_bytes_per_step": ledger if strategy == "fcdp" else None,
        "peak_host_bytes": 640_000_000,
        "host_cache_bytes": 3_400_000 if strategy == "fcdp" else None,
    }


def record(of: Cell, **changes: Any) -> Record:
    """A finished cell; ``changes`` replace fields of the record and figures of its measurement."""
    own = {name: changes.pop(name) for name in Measurement.model_fields if name in changes}
    link = of.inter_bandwidth_bits_per_s
    values: dict[str, Any] = {
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.6", "transformers": "4.57.0"},
        "hardware": {"note": "made up", "cpu": "made-up CPU", "cores": 4},
        "network": {"kind": "tbf", "rate_bits_per_s": link, "burst_bytes": 65536, "mtu": 1500},
        "started_at": "2026-01-02T03:04:05+00:00",
        "seconds": 42.0,
    }
    made = altered(stand_in.record(of, **figures(of)), **own)
    return made.model_copy(update=values | changes)


def altered(of: Record, **figures: Any) -> Record:
    return of.model_copy(update={"measurement": of.measurement.model_copy(update=figures)})


def records() -> list[Record]:
    """24 cells on shaped links, 12 on an unshaped one; one failed and one was skipped."""
    finished = [
        record(cell(strategy, model, tuning, link))
        for link in LINKS
        for model in MODELS
        for tuning in ("full", "lora")
        for strategy in TRAFFIC
    ]
    return [_spoiled(item) for item in finished]


def _spoiled(item: Record) -> Record:
    """Two of the cells have no result, one of them a baseline."""
    key = (item.cell.strategy, item.cell.tuning, item.cell.model.family)
    link = item.cell.inter_bandwidth_bits_per_s
    if key == ("fsdp2", "full", "llama") and link == LINKS[0]:
        return record(item.cell, state="failed", error=ERROR, measurement=None)
    if key == ("deepspeed-zero3", "lora", "llama") and link is None:
        return record(item.cell, state="skipped", error="skip rule", measurement=None)
    return item
