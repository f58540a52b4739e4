"""Messages between roles, the sockets that they go through, and the loop of each role.

A message is a fixed header and a payload, each one frame of ZeroMQ's. Sockets are encrypted and
authenticated by CURVE with keys of the run. Who is silent for too long has ended, or hangs.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from baselines.luwu import WINDOW

_HEADER = struct.Struct("<4sBIIII")
_MAGIC = b"LuW1"
#: Bytes of the largest chunk that may be chosen, and of the largest frame that is let in.
LARGEST_CHUNK = 4 * 2**20
LARGEST_FRAME = LARGEST_CHUNK + 64 * 1024
#: In place of a worker's rank: all of them.
ALL = 2**32 - 1
#: The switch's name.
SWITCH = "switch"


def worker_name(rank: int) -> str:
    return f"worker {rank}"


class Kind(IntEnum):
    """The kind of a message."""

    #: A worker's plan, as JSON; all workers' are alike. Answered by WELCOME: the last complete
    #: step, and whether initial parameters are wanted (``extra``).
    HELLO = 1
    WELCOME = 2
    #: A chunk of the initial parameters, in float32, of worker 0.
    INITIAL = 3
    #: A pass over the layers begins: ``layer`` says which, ``extra`` what of the frozen ones.
    BEGIN = 4
    #: A chunk of parameters, the ``extra``-th of the stream; and how many of them a worker
    #: (``layer``) has taken.
    PARAMETERS = 5
    TAKEN = 6
    #: A chunk of gradients of a step; and that the server has it in its files.
    GRADIENTS = 7
    APPLIED = 8
    #: All of a step is in the server's files.
    COMMITTED = 9
    #: The server's counts, asked for by worker 0 and answered as JSON.
    COUNT = 10
    COUNTS = 11
    #: A sign of life; that a worker has no more to do, or all of them; what went wrong, which ends
    #: the run.
    BEAT = 12
    LEAVE = 13
    ABORT = 14


class Malformed(ValueError):
    """The bytes are not a message."""


@dataclass(frozen=True)
class Message:
    """One message; what its numbers mean depends on its kind."""

    kind: Kind
    step: int = 0
    layer: int = 0
    chunk: int = 0
    extra: int = 0
    payload: Any = b""

    def frames(self) -> list[Any]:
        header = _HEADER.pack(_MAGIC, self.kind, self.step, self.layer, self.chunk, self.extra)
        return [header, self.payload]


def read(frames: Sequence[Any]) -> Message:
    """The message in these frames. Raises ``Malformed``."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise Malformed(f"{len(frames)} frames that are no message")
    magic, kind, step, layer, chunk, extra = _HEADER.unpack(frames[0])
    if magic != _MAGIC or kind not in Kind.__members__.values():
        raise Malformed("a header that is no message's")
    return Message(Kind(kind), step, layer, chunk, extra, frames[1])


def tensor(payload: Any, dtype: torch.dtype) -> torch.Tensor:
    """A payload as a flat tensor with memory of its own."""
    return torch.frombuffer(bytearray(payload), dtype=dtype)


def reason_of(message: Message) -> str:
    """Reason why the run ends."""
    return bytes(message.payload).decode(errors="replace")


#: Seconds between two signs of life, ...
BEAT_S = 1.0
#: ... without any, until a role is given up, ...
PATIENCE_S = 30.0
#: ... and until all roles have met.
MEETING_S = 300.0


class Lost(ConnectionError):
    """A role that the run cannot go on without is gone."""


#: The variable that has the run's secret, which all of its processes are given, as hexadecimals.
SECRET = "FCDP_RUN_SECRET"
_SECRET_BYTES = 32
#: Messages that a socket holds in each direction: the windows of both, and what is said beside.
_HIGH_WATER = 4 * WINDOW
_HANDSHAKE_MS = 10_000
_LINGER_MS = 1_000
_DOMAIN = "luwu"


@dataclass(frozen=True)
class Keys:
    """The run's two pairs of keys: of who listens, and of who connects."""

    listener: tuple[bytes, bytes] = field(repr=False)
    peer: tuple[bytes, bytes] = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> Keys:
        """Derive the keys from the run's secret. Raises ``ValueError`` for an invalid one."""
        if not re.fullmatch(f"[0-9a-fA-F]{{{2 * _SECRET_BYTES}}}", secret):
            raise ValueError(f"{SECRET}: allowed are {2 * _SECRET_BYTES} hexadecimal digits")
        raw = bytes.fromhex(secret)
        return cls(_pair(raw, b"listener"), _pair(raw, b"peer"))

    @classmethod
    def of_environment(cls) -> Keys:
        """Take the secret out of the environment, where child processes would find it too."""
        return cls.of(os.environ.pop(SECRET, ""))


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    raw = hashlib.blake2b(secret, digest_size=_SECRET_BYTES, person=role).digest()
    private: bytes = z85.encode(raw)  # type: ignore[no-untyped-call]
    return zmq.curve_public(private), private


class _End:
    """A socket with bounds, in a context of its own."""

    def __init__(self, kind: int, senders: int = 1) -> None:
        """``senders``: how many send through it, each with a window of its own."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.maxmsgsize = LARGEST_FRAME
        self.socket.sndhwm = self.socket.rcvhwm = _HIGH_WATER + (senders - 1) * WINDOW
        self.socket.handshake_ivl = _HANDSHAKE_MS
        self.socket.linger = _LINGER_MS

    def close(self) -> None:
        """Send what is left, for a second at most."""
        self.socket.close()
        self.context.term()


class Listener(_End):
    """A socket that listens on one address, to peers with the run's key alone."""

    def __init__(self, keys: Keys, address: str) -> None:
        """``address``: host and port; port 0 is any that is free.

        Raises ``OSError`` if nobody can listen there.
        """
        super().__init__(zmq.ROUTER)
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        runs_peers = SimpleNamespace(callback=lambda _domain, key: key == keys.peer[0])
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=runs_peers)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.listener
        self.socket.zap_domain = _DOMAIN.encode()
        # A message that cannot be sent is an error, and not lost without a word.
        self.socket.router_mandatory = True
        try:
            self.socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        #: Where it listens: host and port.
        self.address = endpoint.removeprefix("tcp://").rstrip("\0")

    def close(self) -> None:
        self._authenticator.stop()
        super().close()


class Connection(_End):
    """A socket that is connected to a listener, under a name."""

    def __init__(self, keys: Keys, address: str, name: str, senders: int = 1) -> None:
        super().__init__(zmq.DEALER, senders)
        self.socket.identity = name.encode()
        self.socket.curve_serverkey = keys.listener[0]
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.peer
        self.socket.connect(f"tcp://{address}")


def send(socket: zmq.Socket[bytes], message: Message, name: str | None = None) -> None:
    """Send without waiting, from a listener to ``name``. Raises ``Lost`` where it cannot."""
    frames = message.frames() if name is None else [name.encode(), *message.frames()]
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        # The switch alone connects to the server.
        who = name or ("server" if socket.identity == SWITCH.encode() else "switch")
        raise Lost(f"{who} is gone, or takes nothing: {error.strerror}") from error


class Inbox:
    """Messages that other threads hand to the one that owns the sockets, and wake it with."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Descriptor that a poller waits for."""
        return self._event

    def put(self, item: Any) -> None:
        """Leave an item; any thread may."""
        self._items.append(item)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[Any]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        return [self._items.popleft() for _ in range(len(self._items))]

    def __del__(self) -> None:
        os.close(self._event)


class Role:
    """One role's loop: it hears its neighbours, is heard itself, and ends where one is silent."""

    def __init__(self, neighbours: Iterable[str], patience_s: float) -> None:
        self._patience_s = patience_s
        self._begun = time.monotonic()
        #: When each neighbour has been heard last; ``None``: it has not come.
        self._heard: dict[str, float | None] = dict.fromkeys(neighbours)
        #: Whether this role has no more to do.
        self._over = False

    def _run(self, hear: Mapping[Any, Callable[[], None]]) -> None:
        """Call what hears a socket, or an inbox, whenever it has something.

        Raises ``Lost`` for a neighbour that has been silent for too long.
        """
        poller = zmq.Poller()
        for source in hear:
            poller.register(source, zmq.POLLIN)
        beat = 0.0
        while not self._over:
            for ready, _ in poller.poll(int(BEAT_S * 500)):
                hear[ready]()
            self._go_on()
            if time.monotonic() - beat >= BEAT_S:
                beat = time.monotonic()
                self._beat()
            self._check_that_all_live()

    def _go_on(self) -> None:
        """Do what there is to do after each message."""

    def _beat(self) -> None:
        """Give all neighbours a sign of life."""
        raise NotImplementedError

    def _note(self, name: str) -> None:
        if name in self._heard:
            self._heard[name] = time.monotonic()

    def _check_that_all_live(self) -> None:
        now = time.monotonic()
        for name, heard in self._heard.items():
            if heard is None and now - self._begun > MEETING_S:
                raise Lost(f"{name} did not come within {MEETING_S:g} s")
            if heard is not None and now - heard > self._patience_s:
                raise Lost(
                    f"{name} has not been heard of for {self._patience_s:g} s: it has ended, or "
                    "hangs"
                )


class Host(Role):
    """A role that others connect to, each under its name."""

    def __init__(self, listener: Listener, guests: Iterable[str], patience_s: float) -> None:
        self._guests = frozenset(guests)
        super().__init__(self._guests, patience_s)
        self._listener = listener
        self._socket = listener.socket
        #: Guests that are gone and said so.
        self._left: set[str] = set()

    @property
    def _here(self) -> list[str]:
        """Guests that have come and are not gone."""
        return sorted(name for name in self._guests if self._heard.get(name) is not None)

    def say(self, name: str, message: Message) -> None:
        """Send to a guest, if it is here; its last words may wait unread when it is gone."""
        if self._heard.get(name) is None:
            return
        try:
            send(self._socket, message, name)
        except Lost:
            del self._heard[name]  # which is answered nothing
            while self._socket.poll(0):
                self._hear_guest()
            if name not in self._left:
                raise

    def abort(self, why: str) -> None:
        """Tell the guests that are here why the run ends."""
        for name in self._here:
            with suppress(Lost):
                send(self._socket, Message(Kind.ABORT, payload=why.encode()), name)

    def _hear_guest(self) -> None:
        name, *frames = self._socket.recv_multipart()
        who = name.decode(errors="replace")
        if who not in self._guests:
            return  # has the run's key, and no business here
        self._note(who)
        self._handle(who, frames)

    def _handle(self, name: str, frames: Sequence[Any]) -> None:
        raise NotImplementedError

    def _let_leave(self, name: str) -> None:
        """Expect nothing more of a guest, which has said goodbye."""
        self._left.add(name)
        self._heard.pop(name, None)
