"""A plan as a table and as JSON."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baselines.registry import find
from simulation import goodput
from simulation.hardware import Hardware
from simulation.planner import quality
from simulation.planner.plan import (
    Plan,
    best,
    differs,
    lacking,
    loading,
    millions,
    replicates,
    shown,
    speed,
    typed,
)
from simulation.planner.request import Request
from simulation.planner.search import Option, Verdict, fits, rests_on, search, tokens_range
from simulation.planner.siblings import lack
from simulation.quantities import format_rate

EVIDENCE = "simulated"
_WAITS_FOR = "waits\nfor"
#: Most rows of a table; the rest is in its files.
_MOST = 10
#: Most strategies of a figure, and its clusters: factors of the plan's nodes and bandwidth.
_DRAWN = 4
_NODES_TIMES = (0.25, 0.5, 1, 2, 4, 8)
_LINK_TIMES = (0.125, 0.25, 0.5, 1, 2, 4, 8)
#: Short names of resources that a step waits for.
_SHORT = {"inter_node": "link", "intra_node": "node", "host_to_device": "copies"}
_SHORT |= {"device_to_host": "copies"}
#: Fewest steps that a training is thought to need: ours.
_FEWEST_STEPS = 100
#: Titles of columns, and texts in them.
_Cells = tuple[tuple[str, str], ...]
#: Fields of a workload that was tried, as JSON has them.
_CHOICES = (
    "policy",
    "partial_gradients",
    "within_stage",
    "nodes_per_stage",
    "pipeline_schedule",
    "stages_per_node",
    "sequence_length",
    "micro_batch",
    "accumulation",
    "recomputed",
    "checkpointing",
)
#: Measures of an option in the same place.
_MEASURES = ("step_seconds", "tokens_per_s", "mfu", "hfu", "waits_seconds", "busy_seconds")


def titles(request: Request) -> tuple[str, ...]:
    """Lines on the training, the cluster, and the basis of the seconds of computation."""
    hardware = request.hardware
    tuning = "full"
    if request.lora_rank is not None:
        where = " of all linear layers" if request.lora_targets == "all" else ""
        tuning = f"LoRA {request.lora_rank}{where} on {request.frozen_dtype}"
    lengths = ", ".join(map(str, request.sequence_lengths))
    batches = "a micro-batch per rank and step"
    each = [(request.sequences_per_rank(length), length) for length in request.sequence_lengths]
    counts = [(whole * hardware.world_size, length) for whole, length in each if whole is not None]
    if counts:
        sequences = ", ".join(dict.fromkeys(f"{count:,}" for count, _ in counts))
        tokens = ", ".join(dict.fromkeys(millions(count * length) for count, length in counts))
        batches = f"{sequences} sequences ({tokens} tokens) per step"
    usual = request.usual_length
    shortened = ""
    if usual is not None and usual not in request.sequence_lengths:
        whole = fits(replace(request, sequence_lengths=(usual,)))
        what = "the base fits host memory or disks alone" if whole else "nothing fits"
        shortened = f" (usual are {usual}, with which {what})"
    link = f"{format_rate(8 * hardware.inter_bytes_per_s)} reached between nodes"
    nodes = f"{hardware.nodes} nodes" if hardware.nodes > 1 else "1 node"
    products = "" if request.product_dtype == "bf16" else f", products in {request.product_dtype}"
    return (
        f"{request.model} · {tuning} · {lengths} tokens a sequence{shortened} · {batches}",
        f"{nodes} × {hardware.ranks_per_node} {hardware.device.name} · "
        + (f"{link} · " if hardware.nodes > 1 else "")
        + f"{hardware.host_memory_bytes / 1e9:.4g} GB host memory a node · {EVIDENCE}",
        f"computation, {request.kernels or 'flash'} kernels{products}: {rests_on(hardware)}",
    )


def table(plan: Plan) -> RenderableType:
    """The plan for a terminal: strategies that fit, fastest first; the others; the advice."""
    alike: dict[_Cells, list[Verdict]] = {}  # equal rows are one
    for verdict in plan.verdicts:
        if verdict.best is not None:
            alike.setdefault(tuple(_cells(plan, verdict.best).items()), []).append(verdict)
    rows = list(alike.items())
    grid = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("strategy\n", overflow="fold")
    for title, _ in rows[0][0]:
        side: Literal["left", "right"] = "left" if title == _WAITS_FOR else "right"
        grid.add_column(title, justify=side, no_wrap=True)
    notes = []
    always = shown(plan.verdicts, plan.taken)
    needed = [row for row in rows if any(one in always for one in row[1])]
    others = [row for row in rows if row not in needed][: _MOST - len(needed)]
    rows_shown = [row for row in rows if row in needed or row in others]
    if len(rows) > len(rows_shown):
        notes.append(Text(f"{len(rows) - len(rows_shown)} more: --csv FILE", style="dim"))
    for cells, alike_ones in rows_shown:
        first, *rest = sorted(alike_ones, key=lambda one: one is not plan.taken)
        more = f" +{len(rest)}" if rest else ""
        style = "bold" if first is plan.taken else ""
        grid.add_row(_name(first) + more, *dict(cells).values(), style=style)
        if rest:
            same = ", ".join(one.name for one in rest)
            notes.append(Text(f"{first.name}{more}: the same to the digit: {same}"))
    if any(differs(one.strategy) for _, ones in rows_shown for one in ones):
        notes.append(Text("~ rounds what crosses nodes, or has workers step apart", style="dim"))
    advice = [Text.assemble(("take ", "bold"), (plan.taken.name, "bold green"), f": {plan.reason}")]
    if plan.flip is not None:
        advice.append(Text(f"closest flip: {plan.flip.sentence(plan.taken)}"))
    if form := best(plan.verdicts, lambda one: one.uses_fcdp):
        workload = _option_of(form).workload
        advice.append(Text(f"FCDP's best form: {typed(workload)}"))
        if (how := loading(workload, plan.request.hardware)) is not None:
            advice.append(Text(f"loading it: {how}"))
    head = (Text(line, style="bold cyan") for line in titles(plan.request))
    notes += _notes(plan)
    then = "next, on a node of these: python -m experiments preflight; then plan --preflight FILE"
    if plan.request.hardware.rates.basis.startswith("preflight"):
        then = "next: python -m experiments run MATRIX --cluster rented (docs/nodes.md)"
    return Group(*head, Text(), grid, Text(), *notes, *advice, Text(then, style="dim"))


def _notes(plan: Plan) -> Iterator[Text]:
    """Lines on what the table does not have."""
    request, workload = plan.request, plan.option.workload
    lacks: dict[str, list[str]] = {}  # each lack once
    for verdict in plan.verdicts:
        if verdict.best is None:
            what = lacking(verdict.shortfall) + _shorter(request, verdict.strategy)
            lacks.setdefault(what, []).append(verdict.name)
    for what, names in lacks.items():
        verb = "does not fit: it lacks" if len(names) == 1 else "do not fit: each lacks"
        yield Text(f"{', '.join(names)} {verb} {what}", style="dim")
    left_out = [name for name in request.strategies if name not in request.answered]
    if left_out:
        why = "needs 2 nodes or more"
        if request.packed:
            why = f"not known to hold {request.frozen_dtype}"
        yield Text(f"{why}, left out: {', '.join(left_out)}", style="dim")
    if request.server is not None:
        yield Text(f"{plan.in_network or lack(request)} ({EVIDENCE})")
    share = goodput.of(workload, request.hardware, spot=False)
    failures = f"failures, one in {goodput.GPU_HOURS_PER_FAILURE:,.0f} GPU-hours, leave {share:.1%}"
    yield Text(f"{failures} of the time, which hours and cost do not count", style="dim")
    if unnamed := [f"--{of}" for of in ("kernels", "attention") if getattr(request, of) is None]:
        yield Text(f"ranges hold kernels not named: {', '.join(unnamed)}", style="dim")
    step = workload.tokens * workload.accumulation * request.hardware.world_size
    if step * _FEWEST_STEPS > request.tokens:
        steps = max(1.0, request.tokens / step)
        few = f"{step:.3g} tokens per step leave {steps:,.0f} for {request.tokens:.3g} in all: "
        better = "a smaller batch trains better (--global-batch, --micro-batch)"
        yield Text(few + better, style="yellow")
    # Whether others come to a loss sooner than training exactly, in full by FCDP.
    exact = next((one.best for one in plan.verdicts if one.strategy == "fcdp"), None)
    full = request.lora_rank is None and request.hardware.nodes > 1
    measured = quality.committed()
    if exact is not None and full and measured is not None and (sentence := measured.of(exact)):
        yield Text(sentence)


def _shorter(request: Request, strategy: str) -> str:
    """A clause on the shorter sequences with which a replica of a frozen base fits, if any."""
    if request.lora_rank is None or not replicates(strategy):
        return ""
    shorter = replace(request, strategies=(strategy,)).shorter()
    lengths = (one.sequence_lengths[0] for one in shorter if fits(one))
    length = next(lengths, None)
    return "" if length is None else f", but not with sequences of {length} tokens"


def document(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, with all of the grid; sizes in bytes, times in seconds."""
    request, hardware = plan.request, plan.request.hardware
    fields: dict[str, Any] = {
        "evidence": EVIDENCE,
        **_of(request, "model", "lora_rank"),
        "lora_targets": None if request.lora_rank is None else request.lora_targets,
        "frozen_dtype": None if request.lora_rank is None else request.frozen_dtype,
        **_of(hardware, "nodes", "ranks_per_node"),
        "gpu": hardware.device.name,
        "inter_bytes_per_s": _finite(hardware.inter_bytes_per_s),
        "intra_bytes_per_s": _finite(hardware.intra_bytes_per_s),
        **_of(hardware, "host_memory_bytes", "matmul_efficiency"),
        "computation": rests_on(hardware),
        **_of(request, "kernels", "attention", "product_dtype", "reduce_dtype"),
        "inter_latency_seconds": hardware.inter_latency_seconds,
        "goodput": goodput.of(plan.option.workload, hardware, spot=False),
        **_of(request, "global_batch", "tokens", "price_per_gpu_hour"),
        "recommended": plan.taken.name,
        "reason": plan.reason,
        "flip": plan.flip and plan.flip.sentence(plan.taken),
        "strategies": [_verdict(plan, verdict) for verdict in plan.verdicts],
    }
    if request.server is not None:
        fields["luwu"] = plan.in_network and plan.in_network.document()
        if plan.in_network is None:
            fields["luwu_lacks"] = lack(request)
    return fields


def curves(plan: Plan) -> dict[str, Any]:
    """The plan for JSON, with speeds of some of its strategies over nodes and over links.

    Raises ``ValueError`` where no link between nodes is known.
    """
    request, hardware = plan.request, plan.request.hardware
    if math.isinf(hardware.inter_bytes_per_s):
        raise ValueError("--figure: needs the bandwidth of a node's link (--inter-node)")
    fitting = [option.workload.strategy for option in plan.fitting]
    rivals = [name for name in ("fcdp", "fsdp2") if name in fitting]
    strategies = tuple(dict.fromkeys([plan.strategy, *rivals, *fitting]))[:_DRAWN]
    nodes, rate = hardware.nodes, hardware.inter_bytes_per_s
    counts = [int(nodes * times) for times in _NODES_TIMES if nodes * times >= 1]
    clusters = [("nodes", replace(hardware, nodes=count)) for count in counts]
    links = (replace(hardware, inter_bytes_per_s=rate * times) for times in _LINK_TIMES)
    clusters += [("gbit_s", cluster) for cluster in links]
    batch = request.global_batch
    points: dict[str, list[dict[str, Any]]] = {}
    for axis, cluster in clusters:
        if isinstance(batch, int) and batch % cluster.world_size:
            continue
        asked = replace(request, hardware=cluster, strategies=strategies)
        found = sorted(search(asked), key=speed)  # of two pipelines the faster one is shown
        for option in {of.strategy: of.best for of in found if of.best is not None}.values():
            low, high = tokens_range(option, asked)
            name = option.workload.strategy
            at = {"strategy": name, **_place(cluster), "gpus": cluster.world_size}
            speeds = {"tokens_per_s": option.tokens_per_s, "low": low, "high": high}
            points.setdefault(axis, []).append(at | speeds)
    return document(plan) | {"at": _place(hardware), "curves": points}


def _place(hardware: Hardware) -> dict[str, float]:
    """Place of a cluster on a figure's axes."""
    return {"nodes": hardware.nodes, "gbit_s": 8e-9 * hardware.inter_bytes_per_s}


def rows(plan: Plan) -> list[dict[str, Any]]:
    """The best option of each strategy that fits, flat, fastest first; sizes in bytes."""
    nested = ("device_bytes", "host_bytes", "disk_bytes", "waits_seconds", "busy_seconds")
    records = []
    for verdict in (one for one in plan.verdicts if one.best is not None):
        option = _option(plan, _option_of(verdict))
        low, high = option.pop("tokens_per_s_range")
        sums = {key: sum(option.pop(key).values()) for key in nested[:3]}
        flat = {key: value for key, value in option.items() if key not in nested}
        more = {"least_tokens_per_s": low, "most_tokens_per_s": high}
        records.append({"strategy": verdict.name, **flat, **sums, **more})
    return records


def _of(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def _finite(rate: float) -> float | None:
    """A rate as JSON has it; ``None`` where nothing limits it."""
    return rate if math.isfinite(rate) else None


def _option_of(verdict: Verdict) -> Option:
    assert verdict.best is not None, "it fits"
    return verdict.best


def _name(verdict: Verdict) -> str:
    """The row's name, with settings that are not the usual ones, and a mark if it differs."""
    of = _option_of(verdict).workload
    policy = "" if of.policy == "host" else f", {of.policy}"
    sums = "" if of.partial_gradients == "device" else f", sums on the {of.partial_gradients}"
    mark = " ~" if differs(of.strategy) else ""
    return f"{verdict.name}{policy}{sums}{mark}"


def _cells(plan: Plan, option: Option) -> dict[str, str]:
    """Texts of a row by the titles of their columns."""
    workload = option.workload
    batch = str(workload.micro_batch)
    if workload.accumulation > 1:
        batch += f"×{workload.accumulation}"
    cost = plan.cost(option)
    several = len(plan.request.sequence_lengths) > 1
    selective = workload.checkpointing == "selective"
    return {
        **({"tokens\nlong": str(workload.sequence_length)} if several else {}),
        "batch\n": batch,
        "redo\n": "sel." if selective else f"{workload.recomputed:.0%}",
        "device\nGB": f"{option.footprint.device_bytes / 1e9:.1f}",
        "host\nGB": f"{option.footprint.host_bytes / 1e9:.1f}",
        "tokens/s\n": f"{option.tokens_per_s:,.0f}",
        "range\n": _range(plan, option),
        "MFU\n%": f"{100 * option.mfu:.0f}",
        _WAITS_FOR: _SHORT.get(option.bottleneck, option.bottleneck),
        "GPU-\nhours": f"{plan.hours(option):,.0f}",
        **({} if cost is None else {"cost\n": f"{cost:,.0f}"}),
    }


def _range(plan: Plan, option: Option) -> str:
    low, high = tokens_range(option, plan.request)
    scale, unit = (1e6, "M") if low >= 1e6 else (1e3, "k") if low >= 1e3 else (1.0, "")
    ends = (float(f"{speed / scale:.3g}") for speed in (low, high))  # 1180, not 1.18e+03
    return f"{'–'.join(f'{end:g}' for end in ends)}{unit}"


def _verdict(plan: Plan, verdict: Verdict) -> dict[str, Any]:
    best = verdict.best
    return {
        "strategy": verdict.strategy,
        "name": verdict.name,
        "fits": best is not None,
        "exact": not differs(verdict.strategy),
        "engine": find(verdict.strategy).engine,
        "largest_micro_batch": verdict.largest_micro_batch,
        "lacks_device_bytes": 0.0 if best else verdict.shortfall.device_bytes,
        "lacks_host_bytes": 0.0 if best else verdict.shortfall.host_bytes,
        "best": None if best is None else _option(plan, best),
        "grid": [_option(plan, option) for option in verdict.options],
    }


def _option(plan: Plan, option: Option) -> dict[str, Any]:
    needs = option.footprint
    return {
        **_of(option.workload, *_CHOICES),
        "device_bytes": dict(needs.device),
        "host_bytes": dict(needs.host),
        "disk_bytes": dict(needs.disk),
        **_of(option, *_MEASURES),
        "tokens_per_s_range": list(tokens_range(option, plan.request)),
        "bottleneck": option.bottleneck,
        "inter_node_bytes": option.inter_node_bytes,
        "gpu_hours": plan.hours(option),
        "cost": plan.cost(option),
    }
