"""``python -m experiments run``: a matrix, or a suite of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments import terminal, tracking
from experiments.clusters.interface import ClusterError
from experiments.commands import kinds, session
from experiments.matrix import files, reader
from experiments.matrix.reader import Matrix
from experiments.records import allowed, provenance, select
from experiments.records.abilities import Kind
from experiments.records.cell import Cell, ClusterSpec, SimulatedSpec
from experiments.records.modelled import cluster_of, workload_of
from experiments.records.record import Record
from experiments.runner.directory import RETRIED, RunDirectory
from experiments.terminal.progress import clock
from fcdp import sizes
from simulation.prediction import predict

if TYPE_CHECKING:
    from simulation.planner.rent import Instance


def run(
    matrix: Annotated[
        str,
        typer.Argument(
            metavar="MATRIX",
            help="A name in experiments/matrices, or the path of a file; of a folder of them too.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where records, logs and report go (runs/MATRIX)."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Run only cells without a record, or that failed before a step."
        ),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="--resume, and run failed and timed-out ones.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="CELLS", help="Only cells with these settings (policy=disk,k=4) or this id."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SETTING=VALUE", help="Another value, or [a, list], than the file's."
        ),
    ] = None,
    cluster: Annotated[
        Kind | None,
        typer.Option(
            metavar="KIND",
            help="Where to run, emulated, rented or simulated: the matrix file says, unless this "
            "does.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells, with simulated time and memory.")
    ] = False,
    instance: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --dry-run: on as many of these instances (`plan --instances all` has their "
            "names) as the matrix has nodes, with what the steps cost.",
        ),
    ] = None,
    no_wandb: Annotated[
        bool,
        typer.Option("--no-wandb", help="Write no W&B runs (offline ones, unless WANDB_MODE)."),
    ] = False,
) -> None:
    """Run a matrix: every cell in fresh processes, then table, figures, report and W&B runs.

    A folder of matrices is a suite, such as `paper`: they run one after another, into DIR/NAME.

    Without --resume the matrix starts afresh, and what an earlier run left in DIR moves to
    DIR/earlier/TIME. Exit status: 0; 1 if a cell failed or timed out, if its losses are not those
    of the matrix's reference, or if the report could not be drawn; 2 if the run cannot start or go
    on; 75 if a node is lost and 130 if interrupted (go on with --resume).
    """
    with terminal.stopping(ClusterError):
        settings = files.parse(changes or ())
        if instance is not None and (not dry_run or cluster not in (None, "rented")):
            raise ValueError("--instance goes with --dry-run, of a matrix on rented nodes")
        rented = None if instance is None else _named(instance)
        matrices = [_read(name, cluster, settings, rented) for name in files.members(matrix)]
        names = Counter(Path(each.name).name for each in matrices)
        for name, count in names.items():
            if count > 1:  # their records would go to one folder
                raise ValueError(
                    f"MATRIX: {count} of its matrices are named {name!r}; each needs its own name"
                )
        suite = len(matrices) > 1
        chosen = [(*pair, _path(pair[0], output, suite)) for pair in _select(matrices, only)]
        cells_in_all = sum(len(cells) for _, cells, _ in chosen)
        if tracking.sweep_run() and cells_in_all > 1:
            raise ValueError(f"--only: a W&B sweep's run is of one cell, and not {cells_in_all}")
        resumed = resume or retry_failed
        for expanded, cells, path in chosen:
            here = expanded.cluster.can.make_nodes and not expanded.simulated
            if dry_run or here:
                finished = RunDirectory(path).kept(expanded, retry_failed) if resumed else []
                _check(expanded, cells, finished, rented, shown=dry_run)
    if dry_run:
        return
    well = True
    for expanded, cells, path in chosen:
        with session.opened(expanded, path, resume=resumed, retry_failed=retry_failed) as opened:
            directory, finished = opened
            records = session.run_cells(expanded, cells, finished, directory, wandb=not no_wandb)
            drawn = session.finish(records, directory, wandb=not no_wandb)
            reached = session.reach_reference(expanded, directory)
        failed = any(record.state in RETRIED for record in records)
        well &= drawn and reached and not failed
    if not well:
        raise typer.Exit(terminal.FAILED)


def _named(instance: str) -> Instance:
    # The planner and its tables, which only a dry run on rented nodes waits for.
    from simulation.planner import rent

    return rent.named(instance)


def _read(
    name: str, cluster: Kind | None, changes: Mapping[str, Any], rented: Instance | None = None
) -> Matrix:
    """The matrix, on the kind of cluster that is asked for, or on instances to be rented.

    Emulated nodes have cores of their own if there are enough and the file does not say.
    """
    read = partial(reader.read, name, changes=changes, simulated=cluster == "simulated")
    matrix = _on_kind(read, cluster, rented)
    spec = matrix.cluster
    if spec.can.make_nodes and "cores" not in spec.model_fields_set:
        assert isinstance(spec, ClusterSpec), "others have no nodes to make"
        if len(provenance.cores()) >= spec.nodes:
            return read(spec.model_copy(update={"cores": "own"}))
    return matrix


def _on_kind(read: Callable[..., Matrix], cluster: Kind | None, rented: Instance | None) -> Matrix:
    if rented is None and cluster != "emulated":
        return read(kinds.override(cluster))
    spec = read().cluster
    if rented is not None:
        return read(ClusterSpec(kind="rented", nodes=spec.nodes, ranks_per_node=rented.gpus))
    if isinstance(spec, SimulatedSpec):
        raise ValueError(
            f"--cluster emulated: the matrix is for {spec.nodes} × {spec.ranks_per_node} simulated "
            f"{spec.gpu}, whose cells this machine cannot train; allowed: simulated"
        )
    return read(spec.model_copy(update={"kind": "emulated"}))


def _select(matrices: Sequence[Matrix], only: str | None) -> list[tuple[Matrix, list[Cell]]]:
    """The matrices with the cells asked for; one without any is left out."""
    cells = [cell for matrix in matrices for cell in matrix.cells]
    ids = {cell.id for cell in (cells if only is None else select.chosen(cells, only))}
    selected = [(matrix, [cell for cell in matrix.cells if cell.id in ids]) for matrix in matrices]
    return [(matrix, cells) for matrix, cells in selected if cells]


def _path(matrix: Matrix, output: Path | None, suite: bool) -> Path:
    """The directory of a matrix's records, logs and report."""
    if output is not None:
        return output / Path(matrix.name).name if suite else output
    # One kind of evidence per directory: a cell has the same id whether it is run or simulated.
    apart = "-simulated" * (matrix.simulated and matrix.cluster.can.start_processes)
    return Path("runs") / f"{matrix.name}{apart}"


#: Host memory of one rank's process beside what the simulator counts, in bytes: about as much
#: whether ranks share imported modules or not.
_PROCESS = 200e6


def _check(
    matrix: Matrix,
    cells: Sequence[Cell],
    finished: Sequence[Record],
    instance: Instance | None,
    *,
    shown: bool,
) -> None:
    """Refuse a cell that needs more memory than this machine has, by the simulator's estimate.

    If ``shown``, list the cells: which would run, how long, and in how much memory. With
    ``instance`` the nodes are such instances, and the total has the price of their steps.
    """
    done = {record.cell_id: record.state for record in finished}
    running = [cell for cell in cells if cell.id not in matrix.skipped and cell.id not in done]
    estimates = {cell.id: _estimate(cell, instance) for cell in running}
    if shown:
        for cell_id in (cell.id for cell in cells):
            if cell_id in estimates:
                status = estimates[cell_id][0]
            elif cell_id in matrix.skipped:
                status = f"skipped: {matrix.skipped[cell_id]}"
            else:
                status = f"has a record: {done[cell_id]}"
            terminal.say_as_it_is(f"{cell_id}  {status}", "" if cell_id in estimates else "dim")
        skipped = sum(cell.id in matrix.skipped for cell in cells)
        steps = sum(cell.warmup_steps + cell.steps for cell in running)
        counts = f"{len(running)} cells to run, {steps} steps in all, {skipped} skipped"
        known = [seconds for _, seconds, _ in estimates.values() if seconds is not None]
        if known and not matrix.simulated:
            counts += f"; simulated, {clock(sum(known))} of steps"
            if instance is not None:
                counts += _price(instance, matrix.cluster.nodes, sum(known))
            unknown = len(running) - len(known)
            counts += f", {unknown} cells unknown" if unknown else ""
        terminal.console().print(f"{matrix.name}: {counts}", style="bold", highlight=False)
    most, largest = max(
        ((here, cell_id) for cell_id, (_, _, here) in estimates.items()), default=(0.0, "")
    )
    if (why := allowed.why_too_large(most, provenance.memory_bytes())) is not None:
        raise ValueError(f"{largest} {why}")


def _price(instance: Instance, nodes: int, seconds: float) -> str:
    price = instance.list_usd_per_hour
    if price is None:
        return f", whose price on {nodes} × {instance.instance} is not known"
    cost = nodes * price * seconds / 3600
    return f", {cost:,.2f} USD on {nodes} × {instance.instance} ({price:g} USD per hour)"


def _estimate(cell: Cell, instance: Instance | None) -> tuple[str, float | None, float]:
    """The simulator's answer in words, seconds of all steps, and bytes of this machine.

    ``None`` and 0 where there are none.
    """
    if instance is None and not cell.cluster.can.describe_hardware:
        return "on hardware that is not known: --instance says which", None, 0.0
    if (why := allowed.why_not_simulated(cell)) is not None:
        return why, None, 0.0
    hardware = cluster_of(cell) if instance is None else instance.cluster(cell.cluster.nodes)
    try:
        prediction = predict(workload_of(cell), hardware)
    except ValueError as error:
        return f"is not simulated: {error}", None, 0.0
    needs, cluster, here = prediction.footprint, cell.cluster, 0.0
    memory = f"{sizes.written(needs.device_bytes)} per device"
    memory += f", {sizes.written(needs.host_bytes)} per host" if needs.host_bytes else ""
    if cluster.can.make_nodes:
        per_node = cluster.ranks_per_node * (needs.device_bytes + _PROCESS) + needs.host_bytes
        here = cluster.nodes * per_node
        memory = f"{sizes.written(here)} of this machine"
    seconds = prediction.step_seconds * (cell.warmup_steps + cell.steps)
    return f"{prediction.step_seconds:.3g} s/step, {memory}", seconds, here
