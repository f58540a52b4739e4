"""``python -m experiments preflight``: measures a cluster and shows what it found."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments import terminal
from experiments.clusters import start_barrier
from experiments.clusters.interface import Cluster, ClusterError, Launch
from experiments.commands import kinds
from experiments.preflight.schema import Link, Preflight, Probed
from experiments.records import provenance
from experiments.records.abilities import Kind
from experiments.records.cell import ClusterSpec
from fcdp import sizes
from simulation import quantities
from simulation.files import now

#: Has NCCL say in the ranks' logs what it sends by, and where a record has that.
_SAYING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
_USED = "nccl_sends_by"


def preflight(
    cluster: Annotated[
        Kind, typer.Option(metavar="KIND", help="What to measure: emulated, or rented nodes.")
    ] = "emulated",
    nodes: Annotated[int, typer.Option(min=1, help="Of an emulated cluster.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Per node of an emulated cluster.")] = 2,
    bandwidth: Annotated[
        str, typer.Option(help="Between emulated nodes, such as '10 Mbit/s'.")
    ] = "unshaped",
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Where the figures go, as JSON (runs/preflight/preflight.json).",
        ),
    ] = Path("runs/preflight/preflight.json"),
) -> None:
    """Measure a cluster's links, copies and compute, for the planner and the simulator.

    `plan --preflight FILE` says whether FCDP will help there, and why. Exit status: 0;
    2 if nothing could be measured.
    """
    with terminal.stopping(ClusterError):
        if cluster == "simulated":
            raise ValueError(
                "--cluster simulated: has nothing to measure; allowed: emulated, rented"
            )
        limit = quantities.link(bandwidth)
        spec = kinds.override(cluster) or ClusterSpec(nodes=nodes, ranks_per_node=ranks)
        terminal.check_writable("--output", output)
        if spec.can.make_nodes:
            kinds.enter_namespace()
        with kinds.cluster(spec, preload=["torch"]) as built:
            measured = measure(built, limit, output.parent / "preflight-logs")
        output.write_text(measured.model_dump_json(indent=1) + "\n", encoding="utf-8")
    terminal.console().print(_table(measured))
    for warning in warnings(measured):
        terminal.say_as_it_is(warning, "yellow")
    terminal.say("figures", output)
    sheet = "" if measured.compute.memory_bytes is None else " --gpu NAME"
    question = f"plan --preflight {terminal.shown(output)}{sheet} --model MODEL"
    terminal.say_as_it_is(f"whether FCDP will help there: python -m experiments {question}")


def warnings(measured: Preflight) -> Iterator[str]:
    """List the reasons why plans for this cluster are wrong."""
    if measured.compute.one_memory:
        yield "CPU and GPU share one memory: a cache in host memory gains nothing"
    asked, used = measured.network.get("nccl", {}), measured.network.get(_USED)
    if asked.get("NCCL_IB_DISABLE") == "1" and used not in (None, "Socket"):
        yield (
            f"NCCL_IB_DISABLE = 1, and NCCL sends by {used}: its plugins do not read that, and the "
            "link that was measured is theirs; NCCL_NET=Socket leaves them out"
        )


def _table(measured: Preflight) -> Table:
    table = terminal.table(["", "latency", "bandwidth", "sizes"], title_justify="left")
    table.title = (
        f"{measured.nodes} nodes × {measured.ranks_per_node} ranks, {measured.compute.device}, "
        f"{measured.backend}: {measured.evidence}"
    )
    links = measured.links
    table.add_row("between nodes, gather, a node sends", *_columns(links.inter_node_all_gather))
    table.add_row("inside a node, gather, a rank sends", *_columns(links.intra_node_all_gather))
    host = measured.host
    table.add_row("host memory, a rank copies", "", _bandwidth(host.copy_bytes_per_s), "")
    table.add_row("host → device", "", _bandwidth(host.to_device_bytes_per_s), "")
    table.add_row("device → host", "", _bandwidth(host.from_device_bytes_per_s), "")
    for dtype, flops in measured.compute.matmul_flops_per_s.items():
        table.add_row(f"matrix product, {dtype}", "", f"{flops / 1e9:,.1f} GFLOP/s", "")
    if (rate := measured.compute.memory_bytes_per_s) is not None:
        table.add_row("device memory, a kernel reads and writes", "", _bandwidth(rate), "")
    if (block := measured.compute.block) is not None:
        sizes = f"{block.sequences} × {block.sequence_length} tokens, width {block.width:,}"
        took = f"{1e3 * block.seconds:,.3g} ms"
        table.add_row("transformer block, forward and backward", took, "", sizes)
    table.add_row("free host memory", "", f"{host.free_bytes / 1e9:,.1f} GB", "")
    return table


def _columns(link: Link | None) -> tuple[str, str, str]:
    if link is None:
        return "–", "–", ""
    sizes = f"{link.samples[0].bytes:,} to {link.samples[-1].bytes:,} bytes"
    return f"{link.latency_s * 1e6:,.0f} µs", _bandwidth(link.bytes_per_s), sizes


def _bandwidth(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return "–"
    return f"{sizes.written(bytes_per_s)}/s ({quantities.format_rate(8 * bytes_per_s)})"


def measure(cluster: Cluster, bits_per_s: int | None, directory: Path) -> Preflight:
    """Measure a built cluster whose links are limited to ``bits_per_s``; logs go to ``directory``.

    Raises ``ClusterError`` with the first rank's error.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    started_at, started = now(), time.monotonic()
    cluster.shape(None)
    with start_barrier.limiting(directory, lambda: cluster.shape(bits_per_s)) as network:
        arguments, logs = (str(directory.absolute()),), directory / "logs"
        outcome = cluster.run(
            Launch(
                entry="experiments.preflight.probe:main",
                arguments=arguments,
                logs=logs,
                environment=_SAYING,
                timeout_s=600.0,
            )
        )
    if outcome.state != "ok":
        where = "" if outcome.rank is None else f"rank {outcome.rank}: "
        raise ClusterError(f"{outcome.state}: {where}{provenance.scrub(str(outcome.error))}")
    said = "".join(file.read_text(errors="replace") for file in sorted(logs.glob("rank*.log")))
    if (used := re.search(r"NCCL INFO Using network (\S+)", said)) is not None:
        network[_USED] = used[1]
    probed = Probed.model_validate_json((directory / "probed.json").read_bytes())
    return Preflight(
        **dict(probed),
        **vars(provenance.gather()),
        evidence=cluster.can.evidence,
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        inter_bandwidth_bits_per_s=bits_per_s,
        network=network,
        started_at=started_at,
        seconds=time.monotonic() - started,
    )
