"""Sockets between roles: ZeroMQ's, encrypted and authenticated by CURVE with keys of the run."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from baselines.luwu import WINDOW
from baselines.luwu.life import Lost
from baselines.luwu.messages import LARGEST_FRAME, Message

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
        """Derive the keys from the run's secret. Raises ``ValueError`` for what is none."""
        try:
            raw = bytes.fromhex(secret)
        except ValueError:
            raw = b""
        if len(raw) != _SECRET_BYTES:
            raise ValueError(f"{SECRET}: allowed are {2 * _SECRET_BYTES} hexadecimal digits")
        return cls(_pair(raw, b"listener"), _pair(raw, b"peer"))

    @classmethod
    def of_environment(cls) -> Keys:
        """Take the secret out of the environment, where child processes would find it too."""
        return cls.of(os.environ.pop(SECRET, ""))


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """A public and a secret key."""
    raw = hashlib.blake2b(secret, digest_size=_SECRET_BYTES, person=role).digest()
    own: bytes = z85.encode(raw)  # type: ignore[no-untyped-call]
    return zmq.curve_public(own), own


class _RunsPeers:
    """Lets in who has the run's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class Listener:
    """A socket that listens on one address, to peers with the run's key alone."""

    def __init__(self, keys: Keys, address: str) -> None:
        """``address``: host and port; port 0 is any that is free.

        Raises ``OSError`` if nobody can listen there.
        """
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            _DOMAIN, credentials_provider=_RunsPeers(keys.peer[0])
        )
        self.socket = _bounded(self.context.socket(zmq.ROUTER))
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.listener
        self.socket.zap_domain = _DOMAIN.encode()
        # What cannot be sent is an error, and not lost without a word.
        self.socket.router_mandatory = True
        try:
            self.socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
        #: Where it listens: host and port.
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.address = endpoint.removeprefix("tcp://").rstrip("\0")

    def close(self) -> None:
        """Send what is left, for a second at most."""
        self.socket.close()
        self._authenticator.stop()
        self.context.term()


class Connection:
    """A socket that is connected to a listener, under a name."""

    def __init__(self, keys: Keys, address: str, name: str, senders: int = 1) -> None:
        """``senders``: so many, each with a window of its own, may speak through it."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _bounded(self.context.socket(zmq.DEALER), senders)
        self.socket.identity = name.encode()
        self.socket.curve_serverkey = keys.listener[0]
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.peer
        self.socket.connect(f"tcp://{address}")

    def close(self) -> None:
        """Send what is left, for a second at most."""
        self.socket.close()
        self.context.term()


def send(socket: zmq.Socket[bytes], message: Message, name: str | None = None) -> None:
    """Send without waiting; a listener says to whom. Raises ``Lost`` where that cannot be."""
    frames = message.frames() if name is None else [name.encode(), *message.frames()]
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        who = name or "the other end"
        raise Lost(f"{who} is gone, or takes nothing: {error.strerror}") from error


def _bounded(socket: zmq.Socket[bytes], senders: int = 1) -> zmq.Socket[bytes]:
    socket.maxmsgsize = LARGEST_FRAME
    socket.sndhwm = socket.rcvhwm = _HIGH_WATER + (senders - 1) * WINDOW
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.linger = _LINGER_MS
    return socket


class Inbox:
    """What other threads hand to the one that owns the sockets, and wake it with."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """What a poller waits for."""
        return self._event

    def put(self, item: Any) -> None:
        """Leave an item; any thread may."""
        self._items.append(item)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[Any]:
        """All items that are there."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        return [self._items.popleft() for _ in range(len(self._items))]

    def __del__(self) -> None:
        os.close(self._event)
