"""Who leaves may be gone before its last words are read: they count, not that it is gone."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baselines.luwu.server import Server
from baselines.luwu.switch import Switch
from baselines.luwu.wire import SWITCH, Connection, Kind, Listener, Lost, Message, send, worker_name
from tests.baselines.luwu.training import KEYS

pytestmark = pytest.mark.unit

BEAT = Message(Kind.BEAT)


class _Meeting:
    """A listener, and the peers that are connected to it."""

    def __init__(self) -> None:
        self.listener = Listener(KEYS, "127.0.0.1:0")
        self._connections: dict[str, Connection] = {}

    def connect(self, name: str, address: str) -> Connection:
        self._connections[name] = Connection(KEYS, address, name)
        return self._connections[name]

    def comes(self, name: str, hear: Callable[[], None]) -> None:
        """Connect under a name, and have it heard."""
        self.connect(name, self.listener.address)
        self.says(name, BEAT)
        hear()

    def says(self, name: str, message: Message) -> None:
        """Send, and wait until there is something to be heard."""
        send(self._connections[name].socket, message)
        assert self.listener.socket.poll(10_000)

    def goes(self, name: str, *words: Message) -> None:
        """Say a few words and be gone, before the listener has read any."""
        for message in words:
            send(self._connections[name].socket, message)
        self._connections.pop(name).close()
        deadline = time.monotonic() + 10
        with pytest.raises(Lost):
            while time.monotonic() < deadline:
                send(self.listener.socket, BEAT, name)
                time.sleep(0.01)

    def end(self) -> None:
        for connection in self._connections.values():
            connection.socket.linger = 0
            connection.close()
        self.listener.close()


@pytest.fixture
def meeting() -> Iterator[_Meeting]:
    made = _Meeting()
    yield made
    made.end()


@pytest.fixture
def switch(meeting: _Meeting) -> Switch:
    """With two workers, and a server that is not there."""
    to_server = meeting.connect(SWITCH, "127.0.0.1:1")
    made = Switch(meeting.listener, to_server, 2, patience_s=30)
    for rank in range(2):
        meeting.comes(worker_name(rank), made._hear_guest)
    return made


def test_the_switch_reads_how_a_worker_ended(meeting: _Meeting, switch: Switch) -> None:
    meeting.goes("worker 1", Message(Kind.LEAVE))
    switch._to_all(BEAT)
    assert switch._left == {"worker 1"}
    meeting.goes("worker 0")
    with pytest.raises(Lost, match="worker 0 is gone"):
        switch._to_all(BEAT)


@pytest.mark.parametrize("others_wait", [True, False])
def test_the_switch_says_what_a_worker_left_without(
    meeting: _Meeting, switch: Switch, others_wait: bool
) -> None:
    if others_wait:
        meeting.says("worker 0", Message(Kind.GRADIENTS, payload=b"1234"))
    meeting.goes("worker 1", Message(Kind.LEAVE))
    with pytest.raises(Lost, match="worker 1 has left before the others were done"):
        switch._to_all(BEAT)
        meeting.says("worker 0", Message(Kind.GRADIENTS, payload=b"1234"))
        switch._hear_guest()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([Message(Kind.LEAVE)], None),
        ([Message(Kind.ABORT, payload=b"worker 1 has left")], "worker 1 has left"),
        ([], "switch is gone"),
    ],
)
def test_the_server_reads_why_the_switch_ended(
    meeting: _Meeting, tmp_path: Path, words: list[Message], error: str | None
) -> None:
    server = Server(meeting.listener, tmp_path, patience_s=30)
    meeting.comes(SWITCH, server._hear_guest)
    meeting.goes(SWITCH, *words)
    if error is None:
        server._beat()
        assert server._over
    else:
        with pytest.raises(Lost, match=error):
            server._beat()
