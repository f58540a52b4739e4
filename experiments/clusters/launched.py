"""The processes of one question to all nodes, seen through the launchers that started them."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TypeVar

from experiments.clusters.allocation import Launcher
from experiments.clusters.interface import ClusterError, LostNodeError
from experiments.clusters.messages import BEAT_S, SILENCE_S
from experiments.records.provenance import ROOT
from simulation.files import Strict

#: Seconds that a launcher has to end once its input is closed, and after SIGTERM.
_ENDING_S = 20.0
_TERMINATING_S = 5.0
#: Characters of a launcher's standard error that are quoted.
_LONGEST_QUOTE = 2000

AnyAnswer = TypeVar("AnyAnswer", bound=Strict)


class Launched:
    """One node's process; its input is open until ``close``."""

    def __init__(
        self, node: int, host: str, command: list[str], environment: Mapping[str, str]
    ) -> None:
        self.node = node
        #: When the node was last heard of, on the clock of ``time.monotonic_ns``.
        self.heard_ns = time.monotonic_ns()
        self.answer: Future[bytes] = Future()
        self._host = host
        self._closing = Event()
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
        """Send the one question; the answer comes in its time."""
        line = question.model_dump_json().encode() + b"\n"
        # A launcher that does not reach its node takes no input: only a thread may wait for that.
        for target, arguments in ((self._talk, (line,)), (self._listen, ())):
            Thread(target=target, args=arguments, name=f"node{self.node}", daemon=True).start()

    def _talk(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as node:  # the launcher may have ended
            node.write(line)
            node.flush()
            while not self._closing.wait(BEAT_S):
                node.write(b"\n")
                node.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        answer = b"\n"
        while answer == b"\n":
            answer = self._process.stdout.readline()
            self.heard_ns = time.monotonic_ns()
        self._closing.set()
        self.answer.set_result(answer)

    @property
    def silent(self) -> bool:
        """Whether nothing has come from the node for too long."""
        return time.monotonic_ns() - self.heard_ns > SILENCE_S * 1e9

    def read(self, kind: type[AnyAnswer]) -> AnyAnswer:
        """The answer, which has come. Raises ``LostNodeError`` if the launcher ended without."""
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
        """The error that says that this node is lost, and what its launcher said."""
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", errors="replace").strip()[-_LONGEST_QUOTE:]
        return LostNodeError(
            f"node {self.node}, {self._host}, is lost: {reason}" + (f":\n{said}" if said else "")
        )

    def close(self) -> None:
        """Have the node end what runs there; it answers afterwards."""
        self._closing.set()

    def end(self, within_s: float) -> None:
        """Have the launcher end, if need be without the node's consent."""
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
def launched(
    launcher: Launcher, questions: Sequence[Strict], environment: Mapping[str, str]
) -> Iterator[list[Launched]]:
    """Ask each node its question; none of the processes outlives the context."""
    nodes: list[Launched] = []
    try:
        for node, question in enumerate(questions):
            host, command = launcher.hosts[node], launcher.command(node)
            nodes.append(Launched(node, host, command, environment))
            nodes[-1].ask(question)
        yield nodes
    finally:
        for each in nodes:
            each.close()
        deadline = time.monotonic() + _ENDING_S
        for each in nodes:
            each.end(deadline - time.monotonic())


def wait_for_one(nodes: Sequence[Launched], timeout_s: float) -> list[Launched]:
    """Wait for one answer or more; returns the nodes whose answer, or end, came in time.

    Raises ``LostNodeError`` for a node that falls silent.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        wait([each.answer for each in nodes], max(0.0, min(left, BEAT_S)), FIRST_COMPLETED)
        came = [each for each in nodes if each.answer.done()]
        if came or left <= 0:
            return came
        for each in nodes:
            if each.silent:
                raise each.lost(f"nothing was heard of it for {SILENCE_S:g} s")
