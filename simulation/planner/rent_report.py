"""What to rent, as a table, as JSON and as rows of a CSV file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation import goodput
from simulation.planner.plan import differs
from simulation.planner.rent import MOST, Market, Offer
from simulation.planner.report import EVIDENCE
from simulation.planner.request import Request

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(market: Market, request: Request, within_hours: float | None) -> RenderableType:
    """Offers for a terminal, cheapest first, and what was left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("rent\n", "price\n", "strategy\n"):
        grid.add_column(name, no_wrap=True)
    for name in ("tokens/s\n", "hours\n", "cost\n$", "range\n$", "lost to\nfailures"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("prices\nas of", no_wrap=True)
    for offer in market.offers:
        low, high = offer.cost_range
        grid.add_row(
            _name(offer),
            "spot" if offer.spot else "list",
            offer.plan.strategy,
            f"{offer.plan.option.tokens_per_s:,.0f}",
            f"{offer.hours:,.1f}",
            f"{offer.cost:,.0f}",
            f"{low:,.0f}–{high:,.0f}",
            f"{1 - offer.goodput:.1%}",
            offer.instance.as_of,
        )
    lengths = ", ".join(map(str, request.sequence_lengths))
    deadline = "" if within_hours is None else f" within {within_hours:g} hours"
    head = Text(
        f"{request.model} · {request.tokens:.3g} tokens{deadline} · {lengths} tokens a sequence · "
        f"{EVIDENCE}",
        style="bold cyan",
    )
    notes = [
        (f"not one of the {MOST} cheapest, and not simulated", market.dearer),
        ("without a price in the table", market.unpriced),
        ("nothing fits", market.unfit),
        ("nothing is in time", market.late),
        ("whose GPUs the global batch cannot be shared out to", market.uneven),
    ]
    lines = [Text(f"{what}: {', '.join(names)}", style="dim") for what, names in notes if names]
    risk = Text(
        f"failures: one in {goodput.GPU_HOURS_PER_FAILURE:,.0f} GPU-hours; a spot instance is "
        f"taken back after {goodput.SPOT_HOURS:g} hours in the mean (ours); "
        "checkpoints as often as is best",
        style="dim",
    )
    return Group(head, Text(), grid, Text(), *lines, risk)


def document(market: Market, request: Request, within_hours: float | None) -> dict[str, Any]:
    """The offers for JSON."""
    return {
        "evidence": EVIDENCE,
        "model": request.model,
        "tokens": request.tokens,
        "within_hours": within_hours,
        "offers": [row(offer) for offer in market.offers],
        "dearer": list(market.dearer),
        "unpriced": list(market.unpriced),
        "unfit": list(market.unfit),
        "late": list(market.late),
        "uneven": list(market.uneven),
    }


def row(offer: Offer) -> dict[str, Any]:
    """One offer, flat."""
    low, high = offer.cost_range
    instance, option = offer.instance, offer.plan.option
    return {
        "provider": instance.provider,
        "instance": instance.instance,
        "nodes": offer.hardware.nodes,
        "gpus": offer.hardware.world_size,
        "gpu": instance.gpu,
        "price": "spot" if offer.spot else "list",
        "usd_per_hour": offer.price,
        "strategy": offer.plan.strategy,
        "exact": not differs(offer.plan.strategy),
        "sequence_length": option.workload.sequence_length,
        "micro_batch": option.workload.micro_batch,
        "tokens_per_s": option.tokens_per_s,
        "hours": offer.hours,
        "cost_usd": offer.cost,
        "least_cost_usd": low,
        "most_cost_usd": high,
        "goodput": offer.goodput,
        "as_of": instance.as_of,
        "source": instance.source,
    }


def _name(offer: Offer) -> str:
    return f"{offer.hardware.nodes} × {offer.instance.provider} {offer.instance.instance}"
