"""Who is let in, and what is refused; and that a slow worker fills no memory."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from baselines.luwu import WINDOW
from baselines.luwu.plan import Chunk, Frozen, Layer, Parameter, Pass, Plan
from baselines.luwu.port import Port
from baselines.luwu.wire import (
    LARGEST_FRAME,
    Connection,
    Keys,
    Kind,
    Listener,
    Lost,
    Malformed,
    Message,
    read,
    send,
)
from baselines.optimizers import AdamW
from tests.baselines.luwu.training import KEYS, connect, roles

ARRIVES_MS, STAYS_AWAY_MS = 20_000, 700


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(KEYS, "127.0.0.1:0")
    yield made
    made.close()


def _connection(keys: Keys, listener: Listener, name: str = "switch") -> Connection:
    return Connection(keys, listener.address, name)


def test_who_has_the_runs_key_comes_in_and_who_has_not_does_not(listener: Listener) -> None:
    stranger, peer = _connection(Keys.of("00" * 32), listener), _connection(KEYS, listener)
    # Knows whom it talks to, and still is nobody.
    half = Keys(listener=KEYS.listener, peer=Keys.of("11" * 32).peer)
    guest = _connection(half, listener, "guest")
    for each in (stranger, guest):
        send(each.socket, Message(Kind.BEAT))
    assert not listener.socket.poll(STAYS_AWAY_MS)
    send(peer.socket, Message(Kind.BEAT))
    assert listener.socket.poll(ARRIVES_MS)
    name, *frames = listener.socket.recv_multipart()
    assert (name, read(frames).kind) == (b"switch", Kind.BEAT)
    for each in (stranger, guest, peer):
        each.socket.linger = 0
        each.close()


def test_garbage_and_oversized_messages_are_refused(listener: Listener) -> None:
    host, port = listener.address.split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\0garbage" * 10_000)
        raw.settimeout(ARRIVES_MS / 1000)
        with suppress(ConnectionResetError):
            while raw.recv(4096):  # its greeting, then it hangs up
                pass
    peer = _connection(KEYS, listener)
    peer.socket.send_multipart([b"", bytes(LARGEST_FRAME + 1)])
    assert not listener.socket.poll(STAYS_AWAY_MS)
    peer.socket.linger = 0
    peer.close()


@pytest.mark.parametrize("frames", [[b"one"], [b"x" * 21, b""], [b"LuW1" + b"\xff" * 17, b""]])
def test_what_is_no_message_is_malformed(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        read(frames)


def test_it_listens_on_the_given_address_alone(listener: Listener) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", int(listener.address.split(":")[1])))


@pytest.mark.parametrize("secret", ["", "xyz", "00" * 31])
def test_a_secret_that_is_none_is_refused_and_never_shown(secret: str) -> None:
    with pytest.raises(ValueError, match="FCDP_RUN_SECRET: allowed are 64"):
        Keys.of(secret)
    assert KEYS.peer[1].decode() not in repr(KEYS)


def _plan(workers: int, chunks: int) -> Plan:
    layer = Layer(trained=(Parameter(name="w", shape=(chunks, 1024)),), frozen=())
    return Plan(
        workers=workers,
        layers=(layer, layer, layer, layer),
        dtype="float32",
        chunk_bytes=4096,
        learning_rate=1e-3,
        optimizer=AdamW(),
        threads=4,
        pipeline="step",
        merged=True,
    )


def test_a_slow_worker_holds_all_back_to_the_window(tmp_path: Path) -> None:
    """One of two lets no layer go: nobody is sent more than two layers and the window."""
    chunks = 2 * WINDOW
    plan = _plan(2, chunks)
    landed: list[list[Chunk]] = [[], []]

    def come(rank: int) -> Port:
        return connect(made.address, plan, rank, lambda chunk, _: landed[rank].append(chunk))

    with roles(2, tmp_path) as made, ThreadPoolExecutor(2) as threads:
        ports = fast, slow = [*threads.map(come, range(2))]
        for chunk in plan.all_chunks():
            fast.initial(chunk, torch.zeros(chunk.numel))
        for port in ports:
            port.wait(0)
            port.begin(Pass.FORWARD, Frozen.ALL, 0)
        for layer in (0, 1):
            fast.pull(layer)
            fast.release()
        slow.wait(0)
        deadline = time.monotonic() + 20
        while len(landed[0]) < 2 * chunks + WINDOW and time.monotonic() < deadline:
            time.sleep(0.01)
        # What the slow one has not taken is under way, and no more than the window of it.
        assert len(landed[1]) == 2 * chunks
        assert len(landed[0]) == 2 * chunks + WINDOW
        assert len(slow._waiting) == WINDOW
        for port in ports:
            port.close()


def test_a_message_that_is_not_in_the_plan_ends_the_run_in_all_roles(tmp_path: Path) -> None:
    plan = _plan(1, 1)
    with roles(1, tmp_path) as made:
        port = connect(made.address, plan, 0, lambda *_: None)
        port._outbox.put(Message(Kind.GRADIENTS, layer=7, payload=bytes(4096)))
        with pytest.raises(Lost, match="worker 0: server: GRADIENTS of layer 7"):
            port.wait(1)
    assert {"server", "switch"} == made.ended().keys()


@pytest.mark.parametrize(("name", "gone"), [("switch", "server"), ("worker 0", "switch")])
def test_who_takes_nothing_any_more_is_named(name: str, gone: str) -> None:
    connection = Connection(KEYS, "127.0.0.1:1", name)
    connection.socket.linger = 0
    with pytest.raises(Lost, match=f"^{gone} is gone, or takes nothing"):
        for _ in range(10_000):
            send(connection.socket, Message(Kind.BEAT))
    connection.close()
