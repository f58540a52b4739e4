"""``python -m experiments plan``: options in, table out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments import terminal

if TYPE_CHECKING:
    from experiments.costs.hardware import Hardware
    from experiments.preflight.schema import Preflight


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="gpt-10b, gpt-20b or gpt-30b; a Hugging Face config.json or its folder; a name on "
            "the hub whose configuration is cached."
        ),
    ],
    gpu: Annotated[str, typer.Option(help="By its data sheet, such as a40.")],
    nodes: Annotated[str | None, typer.Option(help="As the preflight, if not given.")] = None,
    gpus: Annotated[str | None, typer.Option(help="A node; as the preflight.")] = None,
    inter_node: Annotated[
        str | None, typer.Option(help="A node's nominal bandwidth, such as 100Gbps.")
    ] = None,
    host_memory: Annotated[str, typer.Option(help="A node's, such as 512GB.")] = "512GB",
    peft: Annotated[str | None, typer.Option(help="lora:RANK; without it all is trained.")] = None,
    sequence_length: Annotated[str, typer.Option(help="One, or several with commas.")] = "512",
    micro_batch: Annotated[
        str | None, typer.Option(help="Sequences a rank, with commas; the largest that fits.")
    ] = None,
    global_batch: Annotated[
        str | None, typer.Option(help="Sequences an optimizer step; one micro-batch each.")
    ] = None,
    checkpointing: Annotated[
        str, typer.Option(help="Shares of the blocks that are recomputed, with commas.")
    ] = "0,0.25,0.5,0.75,1",
    strategies: Annotated[
        str | None, typer.Option(help="With commas; all that are simulated.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Of FCDP, with commas: host, disk, auto, threshold(0.8).")
    ] = "host",
    tokens: Annotated[str, typer.Option(help="To train on, such as 1e9.")] = "1e9",
    price_per_gpu_hour: Annotated[
        str | None, typer.Option(help="In any currency; costs are in the same.")
    ] = None,
    preflight: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `preflight` measured, in place of data sheets."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="All of the grid, as JSON.")
    ] = None,
) -> None:
    """Say which strategies fit a cluster, how fast each is, what it costs, and which to take.

    All figures are simulated. Exit status: 0; 2 if nothing fits, or for a mistake.
    """
    from experiments.planner import quantities as q
    from experiments.planner import report
    from experiments.planner.plan import plan as make
    from experiments.planner.refusal import refusal
    from experiments.planner.request import Request

    try:
        hardware = _hardware(gpu, nodes, gpus, inter_node, host_memory, preflight)
        price = price_per_gpu_hour
        request = Request(
            model=model,
            hardware=hardware,
            lora_rank=None if peft is None else q.lora_rank("--peft", peft),
            sequence_lengths=q.each("--sequence-length", sequence_length, q.whole),
            micro_batches=()
            if micro_batch is None
            else q.each("--micro-batch", micro_batch, q.whole),
            recomputed=q.each("--checkpointing", checkpointing, q.share),
            policies=q.each("--policies", policies, q.name),
            global_batch=None if global_batch is None else q.whole("--global-batch", global_batch),
            tokens=q.count("--tokens", tokens),
            price_per_gpu_hour=None if price is None else q.count("--price-per-gpu-hour", price),
            **({} if strategies is None else _names(strategies)),
        )
        found = make(request)
    except (ValueError, OSError) as error:
        terminal.stop(str(error))
    if found is None:
        terminal.stop(refusal(request))
    console = terminal.console()
    console.print(report.table(found))
    if output is not None:
        text = json.dumps(report.document(found), indent=1)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
        terminal.say(console, "plan", output)


def _hardware(
    gpu: str,
    nodes: str | None,
    gpus: str | None,
    inter_node: str | None,
    host_memory: str,
    preflight: Path | None,
) -> Hardware:
    """By the data sheets, or by what was measured where there is a preflight."""
    from experiments.costs.hardware import cluster
    from experiments.planner import quantities as q
    from experiments.planner.measured import measured

    found = None if preflight is None else _read(preflight)
    if found is not None:
        nodes = str(found.nodes) if nodes is None else nodes
        gpus = str(found.ranks_per_node) if gpus is None else gpus
    for option, value in (("--nodes", nodes), ("--gpus", gpus)):
        if value is None:
            raise ValueError(f"{option} is missing: allowed: a whole number, or --preflight FILE")
    assert nodes is not None
    assert gpus is not None
    across = None if found is None else found.links.inter_node_all_gather
    if inter_node is None and across is None and q.whole("--nodes", nodes) > 1:
        raise ValueError("--inter-node is missing: allowed: such as 100Gbps, or --preflight FILE")
    hardware = cluster(
        gpu,
        nodes=q.whole("--nodes", nodes),
        ranks_per_node=q.whole("--gpus", gpus),
        inter_bits_per_s=float("inf")
        if inter_node is None
        else q.bits_per_s("--inter-node", inter_node),
        host_memory_bytes=q.size_bytes("--host-memory", host_memory),
    )
    return hardware if found is None else measured(hardware, found)


def _read(path: Path) -> Preflight:
    from experiments.preflight.schema import Preflight

    return Preflight.read(path)


def _names(text: str) -> dict[str, tuple[str, ...]]:
    from experiments.planner import quantities as q

    return {"strategies": q.each("--strategies", text, q.name)}
