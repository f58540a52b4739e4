"""``python -m experiments node``: one node of a rented cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from experiments import terminal
from experiments.clusters.kinds import PRELOADED


def node(
    number: Annotated[
        int, typer.Option(envvar="FCDP_NODE", min=0, help="Which node this is, counted from 0.")
    ],
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="End if no runner comes for so long.")
    ] = 120.0,
) -> None:
    """Be one node of a rented cluster: launch the ranks that `run --cluster rented` asks for.

    Started once on every node; node 0 is the machine that `run` is called on. Reads FCDP_HEAD,
    FCDP_TOKEN, FCDP_NODES and FCDP_RANKS_PER_NODE, as `run` does.
    """
    from experiments.clusters import node as nodes
    from experiments.clusters.allocation import Allocation
    from experiments.clusters.interface import ClusterError

    try:
        allocation = Allocation.from_env()
        nodes.serve(allocation, number, PRELOADED, patience_s=patience, say=typer.echo)
    except ClusterError as error:
        terminal.stop(str(error))
