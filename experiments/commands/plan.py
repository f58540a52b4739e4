"""``python -m experiments plan``: the planner's command."""

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from typer import Option

from experiments import terminal
from simulation import quantities as q
from simulation.compute import with_rates
from simulation.hardware import LINK_EFFICIENCY, Hardware, card, cluster, described, reported
from simulation.luwu import Server, nominal
from simulation.planner import plan as planner
from simulation.planner import rent, report
from simulation.planner.request import Request

_HOST_MEMORY = "512GB"
#: Fewest bytes of a node's memory: a smaller number lacks its unit.
_LEAST_MEMORY = 10**6
_T = TypeVar("_T")
_Text = str | None
_File = Path | None


def plan(
    model: Annotated[
        str,
        Option(
            help="A name, such as llama-3-8b, mixtral-8x7b or the paper's gpt-30b; a Hugging Face "
            "config.json or its folder; a name on the hub whose configuration is cached."
        ),
    ],
    gpu: Annotated[
        _Text,
        Option(
            help="The GPU, by its data sheet, such as a40 or h100; or your own, such "
            "as mine:tflops=71,gb=24,gb_s=936."
        ),
    ] = None,
    nodes: Annotated[_Text, Option(help="Number of nodes.")] = None,
    gpus: Annotated[_Text, Option(help="GPUs per node.")] = None,
    inter_node: Annotated[
        _Text,
        Option(
            help="A node's nominal bandwidth, such as 100Gbps (instead of what preflight measured)."
        ),
    ] = None,
    fabric: Annotated[_Text, Option(help="Between nodes: tcp, roce, efa or infiniband.")] = None,
    oversubscription: Annotated[
        _Text, Option(help="Times that nodes' bandwidths exceed the network's, such as 4.")
    ] = None,
    host_memory: Annotated[
        _Text, Option(help=f"Memory of a node ({_HOST_MEMORY}, or what is free by preflight).")
    ] = None,
    peft: Annotated[_Text, Option(help="lora:RANK; without it all is trained.")] = None,
    frozen_dtype: Annotated[
        str,
        Option(
            help="What adapters' base is held in: bf16; fp32; and by DDP, FSDP2 and FCDP nf4 "
            "(QLoRA by torchao), bnb-4bit (by bitsandbytes), fp8 (with --product-dtype fp8)."
        ),
    ] = "bf16",
    lora_targets: Annotated[
        str, Option(help="Adapters are on attention's matrices, or on all linear layers.")
    ] = "attention",
    sequence_length: Annotated[
        _Text, Option(help="One, or several with commas; what the model is usually trained on.")
    ] = None,
    micro_batch: Annotated[
        _Text, Option(help="Sequences per rank, with commas; the largest that fits.")
    ] = None,
    global_batch: Annotated[
        _Text,
        Option(
            help="Sequences per optimizer step of all ranks; 1x, a micro-batch of each. Without "
            "it half a million tokens, or 128 sequences with adapters."
        ),
    ] = None,
    checkpointing: Annotated[
        str,
        Option(
            help="Shares of the blocks that are recomputed, and "
            "selective (all blocks, but for matrix products and attention), with commas."
        ),
    ] = "0,selective,0.5,1",
    kernels: Annotated[
        _Text,
        Option(
            help="eager; flash, attention fused as PyTorch has it; fused, norms, activation "
            "functions and loss besides. Without it flash, and a range that has fused in it."
        ),
    ] = None,
    attention: Annotated[
        _Text,
        Option(
            help="The fused attention's generation: flash-1, flash-2, "
            "flash-3. Without it flash-2, and a range that has flash-1 in it."
        ),
    ] = None,
    product_dtype: Annotated[
        str, Option(help="Matrix products of the blocks: bf16; fp8, where the GPU has it.")
    ] = "bf16",
    states: Annotated[
        str,
        Option(help="The optimizer's: fp32; bf16, as the parameters; int8 beside bf16 parameters."),
    ] = "fp32",
    reduce_dtype: Annotated[
        str, Option(help="What gradients are summed in: same, as they are; fp32.")
    ] = "same",
    strategies: Annotated[
        _Text, Option(help="With commas; all that are simulated, but for cyclic ones.")
    ] = None,
    policies: Annotated[
        str, Option(help="Of FCDP, with commas: host, disk, auto, threshold(0.8).")
    ] = "host",
    server: Annotated[
        _Text,
        Option(
            metavar="NIC,DRIVES",
            help="A machine for LuWu's server: its "
            "bandwidth and number of NVMe drives, such as 100Gbps,12.",
        ),
    ] = None,
    tokens: Annotated[str, Option(help="To train on, such as 1e9.")] = "1e9",
    price_per_gpu_hour: Annotated[
        _Text, Option(help="In any currency; costs are in the same.")
    ] = None,
    instances: Annotated[
        _Text,
        Option(
            metavar="all|FILE",
            help="What to rent, cheapest first, in place of a cluster: all that the table of "
            "public clouds has; a CSV file of its form, or a YAML file of one's own nodes.",
        ),
    ] = None,
    within: Annotated[
        _Text, Option(help="With --instances: the tokens' deadline, such as 24h or 3d.")
    ] = None,
    preflight: Annotated[
        _File, Option(metavar="FILE", help="What `preflight` measured: instead of data sheets.")
    ] = None,
    output: Annotated[
        _File, Option("--json", metavar="FILE", help="All of the grid, as JSON.")
    ] = None,
    rows: Annotated[
        _File, Option("--csv", metavar="FILE", help="The table's rows, as CSV.")
    ] = None,
    figure: Annotated[
        _File,
        Option(
            metavar="FILE",
            help="A picture, .svg, .png or .pdf: throughput and cost over nodes and links.",
        ),
    ] = None,
) -> None:
    """Say which strategies fit a cluster, how fast each is, what it costs, and which to take.

    All figures are simulated. Exit status: 0; 2 if nothing fits, or for a mistake.
    """
    with terminal.stopping():
        if gpu is not None:
            gpu = described(gpu)
        options = {
            "--nodes": nodes,
            "--gpus": gpus,
            "--inter-node": inter_node,
            "--host-memory": host_memory,
            "--preflight": None if preflight is None else str(preflight),
            "--price-per-gpu-hour": price_per_gpu_hour,
            "--server": server,
        }
        offered = None if instances is None else _offered(instances, gpu, product_dtype, options)
        if within is not None and offered is None:
            raise ValueError(f"--within = {within!r}: needs --instances")
        if offered is not None:
            # Each offer is checked with its own GPUs.
            hardware = replace(offered[0].cluster(1), ranks_per_node=1)
        else:
            hardware = _nodes(preflight, gpu, options)
        for name, value in (("--fabric", fabric), ("--oversubscription", oversubscription)):
            if value is not None and (offered is not None or preflight is not None):
                raise ValueError(
                    f"{name} = {value!r}: allowed for nodes by data sheets, without --preflight "
                    "and --instances"
                )
        times = _parsed("--oversubscription", oversubscription, q.count)
        if fabric is not None or times is not None:
            hardware = hardware.over(fabric or "unknown", times or 1.0)
        machine = None if server is None else _server(server, hardware)
        batch = "usual" if global_batch is None else _batch(global_batch)
        wholes = partial(q.each, parse=q.whole)
        named: dict[str, Any] = {} if offered is None else {"strategies": rent.STRATEGIES}
        if strategies is not None:
            named = {"strategies": q.each("--strategies", strategies, q.name)}
        request = Request(
            model=model,
            hardware=hardware,
            lora_rank=_parsed("--peft", peft, q.lora_rank),
            lora_targets=cast(Any, lora_targets),
            sequence_lengths=_parsed("--sequence-length", sequence_length, wholes) or (),
            micro_batches=_parsed("--micro-batch", micro_batch, wholes) or (),
            recomputed=q.each("--checkpointing", checkpointing, q.checkpointing),
            kernels=cast(Any, kernels),
            frozen_dtype=cast(Any, frozen_dtype),
            reduce_dtype=cast(Any, reduce_dtype),
            attention=cast(Any, attention),
            product_dtype=cast(Any, product_dtype),
            states=cast(Any, states),
            server=machine,
            policies=q.each("--policies", policies, q.name),
            global_batch=cast(Any, batch),
            tokens=q.count("--tokens", tokens),
            price_per_gpu_hour=_parsed("--price-per-gpu-hour", price_per_gpu_hour, q.count),
            **named,
        )
        if figure is not None and offered is not None:
            raise ValueError(f"--figure = {str(figure)!r}: is of one cluster, without --instances")
        files = {"--json": output, "--csv": rows, "--figure": figure}
        for name, file in files.items():
            if file is not None:
                terminal.check_writable(name, file)
        if offered is None:
            planned = planner.plan(request, flips=True)
            if planned is None:
                raise ValueError(planner.refusal(request))
            shown, table = report.table(planned), report.rows(planned)
            document = report.document(planned) if figure is None else report.curves(planned)
        else:
            limit = _parsed("--within", within, q.hours)
            market = rent.rent(request, offered, limit)
            if not market.offers:
                raise ValueError(rent.refused(market, request, offered))
            shown = rent.table(market, request, limit)
            document = rent.document(market, request, limit)
            table = [rent.row(offer) for offer in market.offers]
    terminal.console().print(shown)
    with terminal.stopping():
        if output is not None:
            output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if rows is not None:
            with rows.open("w", encoding="utf-8", newline="") as lines:
                writer = csv.DictWriter(lines, list(table[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(table)
        if figure is not None:
            drawn = ["draw-plan", "-", "--output", str(figure)]
            if (why := terminal.have_drawn(drawn, json.dumps(document))) is not None:
                raise ValueError(f"--figure = {str(figure)!r}: {why}")
    for file in filter(None, files.values()):
        terminal.say("plan", file)


def _batch(text: str) -> int | None:
    """Sequences per step; ``None`` for ``1x``."""
    return None if text == "1x" else q.whole("--global-batch", text)


def _parsed(option: str, text: str | None, parse: Callable[[str, str], _T]) -> _T | None:
    """An option's value; ``None`` where it was not given."""
    return None if text is None else parse(option, text)


def _offered(
    source: str, gpu: str | None, product_dtype: str, options: Mapping[str, object]
) -> list[rent.Instance]:
    """The instances that were asked for, with the GPU and the products that are.

    Raises ``ValueError`` if one of ``options`` is set, which describe other nodes.
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} = {value!r}: not allowed with --instances, which says it")
    capable = [each for each in rent.read(source) if product_dtype != "fp8" or card(each.gpu).fp8]
    matching = [each for each in capable if gpu is None or each.gpu == gpu]
    if not matching:
        names = ", ".join(sorted({each.gpu for each in capable})) or "none: it is empty"
        raise ValueError(f"--gpu = {gpu!r}: allowed with --instances {source} are {names}")
    return matching


def _nodes(file: Path | None, gpu: str | None, options: Mapping[str, str | None]) -> Hardware:
    """The cluster as preflight measured it, but for ``options``; without a file, by data sheets.

    With these, computation has the rates that were fitted to published runs.
    """
    count, ranks = (_parsed(name, options[name], q.whole) for name in ("--nodes", "--gpus"))
    sized = partial(q.size_bytes, least=_LEAST_MEMORY)
    memory = _parsed("--host-memory", options["--host-memory"], sized)
    nominal = _parsed("--inter-node", options["--inter-node"], q.bits_per_s)
    if file is None:
        count = _needed("--nodes", count)
        alone = count == 1 and nominal is None  # nothing crosses it
        hardware = cluster(
            _needed("--gpu", gpu),
            nodes=count,
            inter_bits_per_s=math.inf if alone else _needed("--inter-node", nominal),
            ranks_per_node=_needed("--gpus", ranks),
            host_memory_bytes=memory or q.size_bytes("--host-memory", _HOST_MEMORY),
        )
        return with_rates(reported(hardware))
    from experiments.preflight.schema import Preflight, hardware_of  # records' schema: start-up

    measured = Preflight.read(file)
    others = {"nodes": count, "ranks_per_node": ranks, "host_memory_bytes": memory}
    overrides: dict[str, Any] = {name: value for name, value in others.items() if value is not None}
    hardware = replace(hardware_of(measured, gpu), **overrides)
    if nominal is not None:
        return hardware.with_inter_bandwidth(LINK_EFFICIENCY * nominal)
    if hardware.nodes > 1 and measured.links.inter_node_all_gather is None:
        raise ValueError(f"--inter-node is missing: {file} has measured no link between nodes")
    return hardware


def _needed(option: str, value: _T | None) -> _T:
    if value is None:
        raise ValueError(f"{option} is missing: give it, or what was measured (--preflight)")
    return value


def _server(text: str, hardware: Hardware) -> Server:
    bandwidth, comma, drives = text.partition(",")
    if not comma:
        raise ValueError(
            f"--server = {text!r}: allowed: a bandwidth and a number of NVMe drives, such as "
            "100Gbps,12"
        )
    if math.isinf(hardware.inter_bytes_per_s):
        raise ValueError("--inter-node is missing: with --server one node's link is used, too")
    return nominal(q.bits_per_s("--server", bandwidth), q.whole("--server", drives), hardware)
