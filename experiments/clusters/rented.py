"""A cluster of real nodes, reached by Slurm's ``srun`` or by ``ssh``.

For every launch of ranks the launcher starts one process on each node (``node``), which starts the
node's agent and with it the ranks. Its order comes on standard input, its answer goes to standard
output, so that nodes need no common file system; the first node sees the run's directory. A node
is lost when its launcher ends without an answer.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from experiments.clusters import causes
from experiments.clusters.allocation import Allocation, Launcher
from experiments.clusters.interface import Cluster, ClusterError, Launch, LostNodeError, Outcome
from experiments.clusters.launch import Node
from experiments.clusters.node import BEAT_S, SILENCE_S, Description, Ended, Inquiry, Order
from experiments.records import provenance
from experiments.records.abilities import ABILITIES
from experiments.records.cell import ClusterSpec
from experiments.records.environment import named, of_launchers, passed_on
from experiments.records.provenance import ROOT
from simulation.files import Strict

#: Seconds for a node to describe itself: a login, Python's imports, git, a queue of steps.
_DESCRIBING_S = 120.0
#: Seconds for the other nodes' ranks to end by themselves after the first failure, ...
_GRACE_S = 5.0
#: ... and for a node to end what still runs.
_FINISHING_S = 30.0
#: Prefixes of the runner's variables that ranks on other nodes see, beside what ``FCDP_PASS``
#: names; all else that they need is their own node's.
_PASSED_ON = ("FCDP_", "NCCL_")
#: Seconds that a launcher has to end once its input is closed, and after SIGTERM.
_ENDING_S = 20.0
_TERMINATING_S = 5.0
#: Characters of a launcher's standard error that are quoted.
_LONGEST_QUOTE = 2000

AnyAnswer = TypeVar("AnyAnswer", bound=Strict)


class RentedCluster(Cluster):
    """The nodes of an allocation, whose links have no limit of ours.

    A context manager: ``__enter__`` asks each node who it is and raises ``ClusterError`` if one
    does not answer or cannot take part. Outside of a launch nothing runs on a node.
    """

    can = ABILITIES["rented"]

    def __init__(self, allocation: Allocation, spec: ClusterSpec) -> None:
        rented = allocation.spec
        if (spec.nodes, spec.ranks_per_node) != (rented.nodes, rented.ranks_per_node):
            raise ClusterError(
                f"{spec.nodes} nodes × {spec.ranks_per_node} ranks are asked for, and "
                f"{rented.nodes} × {rented.ranks_per_node} are rented; "
                "--cluster rented takes what is there"
            )
        super().__init__(spec)
        self._launcher = allocation.launcher
        self._allocation = allocation
        self._port = spec.port

    def __enter__(self) -> RentedCluster:
        counted = os.environ.get("FCDP_INTERFACE")
        inquiry = Inquiry(head=self._allocation.head_address(), counted_interface=counted)
        with launched(self._launcher, [inquiry] * self.nodes) as nodes:
            self._descriptions = _all_answers(nodes, Description, _DESCRIBING_S)
        commit = provenance.gather().commit
        for host, description in zip(self._launcher.hosts, self._descriptions, strict=True):
            if description.commit != commit:
                raise ClusterError(f"{host} has commit {description.commit}, the runner {commit}")
        return self

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Describe the network. Raises ``ClusterError`` for a limit, which nobody sets here."""
        if bits_per_s is not None or to_groups is not None:
            raise ClusterError("the links of rented nodes are not limited to a bandwidth")
        networks = [description.network for description in self._descriptions]
        if all(network == networks[0] for network in networks):
            return networks[0]
        return {f"node{node}": network for node, network in enumerate(networks)}

    def run(self, launch: Launch) -> Outcome:
        """Call the launch's function on every rank, in fresh processes; see ``Cluster.run``.

        Ranks see those variables of their node that ``passed_on`` selects, the runner's of NCCL and
        FCDP and those that ``FCDP_PASS`` names, the launch's, torchrun's, and ``FCDP_INTERFACE``.
        Arguments that name text files here are copied to nodes that do not see these. Raises
        ``LostNodeError`` if a node's launcher ends without an answer.
        """
        assert not launch.extra, "matrices skip cells that need some"
        logs = launch.logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        marker = logs / f".{secrets.token_hex(8)}"
        marker.touch()

        # The node ends its ranks by then even if nobody asks for it.
        node_launch = replace(launch, logs=logs, timeout_s=launch.timeout_s + _GRACE_S)
        texts = {name: Path(name) for name in launch.arguments if Path(name).is_file()}

        names = named(os.environ)
        chosen = {
            name: text
            for name, text in passed_on(os.environ, names).items()
            if name.startswith(_PASSED_ON) or name in names
        }

        def order(node: int) -> Order:
            counted = self._descriptions[node].network["counted_interface"]
            return Order(
                node=Node(
                    node=node,
                    nodes=self.nodes,
                    ranks_per_node=self.ranks_per_node,
                    master_address=self._descriptions[0].address,
                    port=self._port,
                    environment={**chosen, "FCDP_INTERFACE": counted},
                ),
                address=self._descriptions[node].address,
                launch=node_launch,
                files={name: path.read_text() for name, path in texts.items()},
                marker=marker.name,
            )

        try:
            with launched(self._launcher, [*map(order, range(self.nodes))]) as nodes:
                in_time = len(_answers(nodes, Ended, launch.timeout_s, _GRACE_S)) == len(nodes)
                for each in nodes:
                    each.closing.set()
                ended = _all_answers(nodes, Ended, _FINISHING_S)
        finally:
            marker.unlink(missing_ok=True)
        for answer in ended:
            for name, text in answer.logs.items():
                (logs / Path(name).name).write_text(text, encoding="utf-8")
        outcome = _outcome(nodes, ended)
        if outcome.state == "ok" and not in_time:
            return Outcome("timeout", None, f"did not end within {launch.timeout_s:g} s")
        return outcome


def _answers(
    nodes: Sequence[Launched], kind: type[AnyAnswer], timeout_s: float, grace_s: float
) -> dict[int, AnyAnswer]:
    """Answers that come in time, by node; after a failure only ``grace_s`` are left.

    Raises ``LostNodeError`` for a node that ends without an answer, or falls silent.
    """
    deadline = time.monotonic() + timeout_s
    answers: dict[int, AnyAnswer] = {}
    while waiting := [each for each in nodes if each.node not in answers]:
        left = deadline - time.monotonic()
        wait([each.answer for each in waiting], max(0.0, min(left, BEAT_S)), FIRST_COMPLETED)
        new = {each.node: each.read(kind) for each in waiting if each.answer.done()}
        if not new and left <= 0:
            break
        if not new:
            for each in waiting:
                if time.monotonic_ns() - each.heard_ns > SILENCE_S * 1e9:
                    raise each.lost(f"nothing was heard of it for {SILENCE_S:g} s")
        ended = [each for each in new.values() if isinstance(each, Ended)]
        if any(not each.result.ok or each.reports for each in ended):
            deadline = min(deadline, time.monotonic() + grace_s)
        answers |= new
    return answers


def _all_answers(
    nodes: Sequence[Launched], kind: type[AnyAnswer], timeout_s: float
) -> list[AnyAnswer]:
    answers = _answers(nodes, kind, timeout_s, grace_s=timeout_s)  # a failure shortens nothing
    for each in nodes:
        if each.node not in answers:
            raise each.lost("it has not answered in time")
    return [answers[each.node] for each in nodes]


def _outcome(nodes: Sequence[Launched], ended: Sequence[Ended]) -> Outcome:
    results, reports = {}, []
    for node, answer in zip(nodes, ended, strict=True):
        later = node.heard_ns - answer.now_ns
        exits = {
            rank: replace(exit_, moment_ns=exit_.moment_ns + later)
            for rank, exit_ in answer.result.exits.items()
        }
        results[node.node] = replace(answer.result, exits=exits)
        reports += [replace(each, moment_ns=each.moment_ns + later) for each in answer.reports]
    kills = sum(answer.out_of_memory_kills for answer in ended)
    return causes.outcome(results, reports, out_of_memory_kills=kills)


class Launched:
    """A launcher's process, which reaches one node."""

    def __init__(
        self, node: int, host: str, command: list[str], environment: Mapping[str, str]
    ) -> None:
        self.node = node
        #: Time at which the node was last heard of, on the clock of ``time.monotonic_ns``.
        self.heard_ns = time.monotonic_ns()
        self.answer: Future[bytes] = Future()
        self._host = host
        #: Set to have the node end what runs there; it answers afterwards.
        self.closing = Event()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by end
        try:
            # A session of its own: the terminal's Ctrl-C reaches the runner only.
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise ClusterError(f"cannot start {command[0]}: {error.strerror}") from error

    def ask(self, question: Strict) -> None:
        """Send the one question; ``answer`` is set once it is there."""
        line = question.model_dump_json().encode() + b"\n"
        # A launcher that does not reach its node takes no input: only a thread may wait for that.
        for target, arguments in ((self._talk, (line,)), (self._listen, ())):
            Thread(target=target, args=arguments, name=f"node{self.node}", daemon=True).start()

    def _talk(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as node:  # the launcher may have ended
            node.write(line)
            node.flush()
            while not self.closing.wait(BEAT_S):
                node.write(b"\n")
                node.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        answer = b"\n"
        while answer == b"\n":
            answer = self._process.stdout.readline()
            self.heard_ns = time.monotonic_ns()
        self.closing.set()
        self.answer.set_result(answer)

    def read(self, kind: type[AnyAnswer]) -> AnyAnswer:
        """Parse the answer that came. Raises ``LostNodeError`` if the launcher ended instead."""
        line = self.answer.result(timeout=0)
        if not line.endswith(b"\n"):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATING_S)
            raise self.lost(f"its launcher ended, with exit code {self._process.poll()}")
        try:
            return kind.model_validate_json(line)
        except ValueError as error:
            raise self.lost(f"it said {line[:_LONGEST_QUOTE]!r}") from error

    def lost(self, reason: str) -> LostNodeError:
        """The error for a lost node, with the end of its launcher's standard error."""
        self._errors.seek(0)
        tail = self._errors.read().decode("utf-8", errors="replace").strip()[-_LONGEST_QUOTE:]
        return LostNodeError(
            f"node {self.node}, {self._host}, is lost: {reason}" + (f":\n{tail}" if tail else "")
        )

    def end(self, within_s: float) -> None:
        """Wait for the launcher to end; then terminate, and in the end kill it."""
        for patience, act in (
            (max(0.0, within_s), self._process.terminate),
            (_TERMINATING_S, self._process.kill),
        ):
            try:
                self._process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                act()
        self._process.wait()
        self._errors.close()


@contextmanager
def launched(launcher: Launcher, questions: Sequence[Strict]) -> Iterator[list[Launched]]:
    """Ask each node its question; none of the processes outlives the context."""
    nodes: list[Launched] = []
    # Slurm passes the launcher's environment on to the node.
    environment = of_launchers(os.environ)
    try:
        for node, question in enumerate(questions):
            host, command = launcher.hosts[node], launcher.command(node)
            nodes.append(Launched(node, host, command, environment))
            nodes[-1].ask(question)
        yield nodes
    finally:
        for each in nodes:
            each.closing.set()
        deadline = time.monotonic() + _ENDING_S
        for each in nodes:
            each.end(deadline - time.monotonic())
