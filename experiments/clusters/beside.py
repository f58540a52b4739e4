"""Processes beside the ranks, each on an emulated machine of its own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from baselines.description import ExtraProcess
from experiments.clusters import namespaces
from experiments.clusters.causes import describe_exit
from experiments.clusters.ranks import Machine


def addresses(beside: dict[str, tuple[str, str]], port: int) -> dict[str, str]:
    """What ranks and these processes find in their environment: where each of these is."""
    return {f"FCDP_{name.upper()}": f"{address}:{port}" for name, (_, address) in beside.items()}


class BesideProcess:
    """One such process, as the one that starts it sees it."""

    def __init__(
        self, context: ForkServerContext, extra: ExtraProcess, machine: Machine, logs: Path
    ) -> None:
        self.name = extra.name
        self._machine = machine
        self._done = False
        self._error: str | None = None
        self._connection: Connection
        self._connection, other_end = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=_serve,
            args=(machine, extra.entry, str(logs / f"{extra.name}.log"), other_end),
            name=extra.name,
        )
        with other_end:
            self._process.start()

    def why_failed(self) -> str | None:
        """The error that it ended with; ``None`` while it runs, and if all was well."""
        if not self._done and self._connection.poll():
            self._done = True
            try:
                error = self._connection.recv()
            except EOFError:
                self._process.join()
                error = describe_exit(self._process.exitcode or 0)
            self._error = error and f"{self.name}: {error}"
        return self._error

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._process.join()
        namespaces.end_processes(self._machine.namespace)
        self._connection.close()
        self._process.close()


def _serve(machine: Machine, entry: str, log: str, parent: Connection) -> None:
    # Here rather than above: the process that starts this one needs no torch.
    from experiments.clusters import agent

    agent.serve_beside(machine, entry, log, parent)
