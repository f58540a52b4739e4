"""What the runner and the nodes' agents say to each other, and the connection that carries it.

Both ends prove that they know the allocation's token before anything else is said. Messages are
JSON of the types below; a connection whose other end is gone is noticed within half a minute.
"""

from __future__ import annotations

import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from simulation.files import Strict

#: Seconds that a stranger has to answer.
_ANSWER_S = 10
#: The kernel asks a silent peer after 5 s, four times; what was sent must arrive within 20 s.
_KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 20_000,
}


class Lost(ConnectionError):
    """The other end is gone, or does not speak our language."""


class Hello(Strict):
    """An agent's first message: which node it is and what it has."""

    kind: Literal["hello"] = "hello"
    node: int = Field(ge=0)
    ranks: int = Field(ge=1)
    #: Its address on the way to the runner's machine, and the interface that has it.
    address: str
    interface: str
    commit: str | None
    #: What a record says of the node's network.
    network: dict[str, Any]


class Answer(Strict):
    """The runner's answer to ``Hello``: the node takes part, or why it cannot."""

    kind: Literal["answer"] = "answer"
    refusal: str | None = None


class Task(Strict):
    """Launch the ranks of one job."""

    kind: Literal["task"] = "task"
    entry: str
    arguments: list[str]
    #: Content of those arguments that are names of text files on the runner's machine.
    files: dict[str, str]
    #: Where logs go on the runner's machine, and a file in there that tells whether a node sees it.
    logs: str
    marker: str
    environment: dict[str, str]
    nodes: int
    master_address: str
    port: int
    timeout_s: float


class RankExit(Strict):
    rank: int
    code: int
    #: How long ago it was noticed: nodes' clocks differ.
    age_ns: int


class RankReport(Strict):
    """``board.Report`` of a rank."""

    rank: int
    age_ns: int
    state: Literal["failed", "oom"]
    error: str
    lost_peer: bool
    silent_before: list[int]


class Ended(Strict):
    """The node's ranks have ended by themselves."""

    kind: Literal["ended"] = "ended"
    exits: list[RankExit]
    error: str | None


class Finish(Strict):
    """No rank needs node 0's store any more; end what still runs."""

    kind: Literal["finish"] = "finish"


class Idle(Strict):
    """Nothing of the task runs any more."""

    kind: Literal["idle"] = "idle"
    reports: list[RankReport]
    #: Logs by name, if the runner's machine does not see them.
    logs: dict[str, str]
    out_of_memory_kills: int


Message = Hello | Answer | Task | Ended | Finish | Idle
AnyMessage = TypeVar("AnyMessage", bound=Message)
_message: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class Channel:
    """A connection between the runner and one agent; ``multiprocessing`` can wait for it."""

    def __init__(self, connected: socket.socket) -> None:
        for (level, option), value in _KEEP_ALIVE.items():
            connected.setsockopt(level, option, value)
        #: This end's address.
        self.local_address: str = connected.getsockname()[0]
        self._connection = Connection(connected.detach())

    def fileno(self) -> int:
        return self._connection.fileno()

    def poll(self, timeout_s: float) -> bool:
        """Whether a message, or the end of the connection, comes within ``timeout_s``."""
        return self._connection.poll(timeout_s)

    def send(self, message: Message) -> None:
        """Raises ``Lost`` if the other end is gone."""
        try:
            self._connection.send_bytes(message.model_dump_json().encode())
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self) -> Message:
        """The next message. Raises ``Lost`` if there is none to come."""
        try:
            return _message.validate_json(self._connection.recv_bytes())
        except EOFError as error:
            raise Lost("the connection was closed") from error
        except (OSError, ValueError) as error:
            raise Lost(str(error)) from error

    def expect(self, kind: type[AnyMessage]) -> AnyMessage:
        """The next message, which must be of this kind: ``Lost`` is raised for another."""
        message = self.receive()
        if not isinstance(message, kind):
            raise Lost(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def close(self) -> None:
        self._connection.close()


def welcome(connected: socket.socket, token: bytes) -> Channel:
    """The runner's end of a connection that an agent has made; raises ``Lost`` for a stranger."""
    return _channel(connected, token, challenge_first=True)


def connect(address: tuple[str, int], token: bytes) -> Channel:
    """An agent's end. Raises ``OSError`` where nobody listens, ``Lost`` if the token differs."""
    return _channel(socket.create_connection(address, _ANSWER_S), token, challenge_first=False)


def _channel(connected: socket.socket, token: bytes, *, challenge_first: bool) -> Channel:
    connected.setblocking(True)
    _set_receive_timeout(connected, _ANSWER_S)
    channel = Channel(connected.dup())
    proofs = [deliver_challenge, answer_challenge]
    try:
        for prove in proofs if challenge_first else reversed(proofs):
            prove(channel._connection, token)
    except Exception as error:
        channel.close()
        raise Lost(f"no proof of the token: {error or type(error).__name__}") from error
    else:
        _set_receive_timeout(connected, 0)
        return channel
    finally:
        connected.close()


def _set_receive_timeout(connected: socket.socket, seconds: int) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
