"""One channel: pieces of any size arrive in order, and every way to lose a peer is PeerLost."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import numpy as np
import pytest

from tinyllm.dist import link as links
from tinyllm.dist.errors import PeerLost
from tinyllm.dist.link import Link


class Owner:
    """Counts the waits, and gives up after some."""

    def __init__(self, patience: int = 10**6) -> None:
        self.patience = patience
        self.waits: list[tuple[bool, int]] = []

    def waiting(self, peer: int, *, sending: bool, done: int) -> None:
        self.waits.append((sending, done))
        if len(self.waits) >= self.patience:
            raise TimeoutError

    def lost(self, peer: int, why: str) -> PeerLost:
        return PeerLost(f"rank {peer}: {why}", rank=peer)


def linked(owner: Owner) -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    return Link(ours, 3, owner), theirs


def send_all(link: Link, x: np.ndarray) -> threading.Thread:
    thread = threading.Thread(target=link.send, args=(b"head", x))
    thread.start()
    return thread


@pytest.mark.parametrize("one_call", [1 << 30, 1000], ids=["one call", "pieces of 1,000"])
def test_what_is_sent_arrives(one_call: int, monkeypatch) -> None:
    monkeypatch.setattr(links, "ONE_CALL", one_call)
    a, b = socket.socketpair()
    left, right = Link(a, 1, Owner()), Link(b, 0, Owner())
    for n in (0, 1, 100_001):
        x = np.arange(n) * 1.5
        head, got = memoryview(bytearray(4)), np.empty(n)
        thread = send_all(left, x)
        right.recv_into(4 + x.nbytes, head, got)
        thread.join()
        assert bytes(head) == b"head" and np.array_equal(got, x)
    left.close(), right.close()


def test_one_byte_at_a_time() -> None:
    link, other = linked(Owner())
    x = np.arange(40.0)

    def drip() -> None:
        for byte in b"head" + x.tobytes():
            other.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    head, got = memoryview(bytearray(4)), np.empty(40)
    link.recv_into(4 + x.nbytes, head, got)
    thread.join()
    assert bytes(head) == b"head" and np.array_equal(got, x)
    link.close(), other.close()


def test_a_wait_looks_around_and_can_be_given_up() -> None:
    owner = Owner(patience=3)
    link, other = linked(owner)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        link.recv_into(8, np.empty(1))
    assert 2 * links.GLANCE < time.monotonic() - start < 60 * links.GLANCE
    assert owner.waits == [(False, 0)] * 3
    owner.waits.clear()
    with pytest.raises(TimeoutError):
        link.send(b"head", np.zeros(1_000_000))
    assert [sending for sending, _ in owner.waits] == [True] * 3
    assert 0 < owner.waits[0][1] < 8_000_000, "what the kernel took before it was full"
    link.close(), other.close()


def reset(other: socket.socket) -> None:
    """Close with unread data: a reset on the other side."""
    other.close()


@pytest.mark.parametrize("when", ["idle", "inside", "reset"])
def test_a_peer_that_goes_while_we_receive(when: str) -> None:
    link, other = linked(Owner())
    if when == "inside":
        other.sendall(b"head123")
    if when == "reset":
        link.send(b"head", np.zeros(3))
    other.close()
    with pytest.raises(PeerLost) as caught:
        link.recv_into(20, memoryview(bytearray(4)), np.empty(2))
    says = {
        "idle": "rank 3: it closed the connection between messages",
        "inside": "rank 3: it closed the connection after 7 of 20 bytes",
        "reset": "rank 3: Connection reset by peer after 0 of 20 bytes",
    }
    assert str(caught.value) == says[when]
    assert caught.value.rank == 3
    link.close()


@pytest.mark.parametrize("n", [1, 1_000_000], ids=["at once", "while blocked"])
def test_a_peer_that_goes_while_we_send(n: int) -> None:
    link, other = linked(Owner())
    threading.Timer(0.2 if n > 1 else 0.0, other.close).start()
    time.sleep(0.1)
    with pytest.raises(PeerLost, match=r"Broken pipe while sending to it|reset by peer"):
        link.send(b"head", np.zeros(n))
    link.close()


def test_over_tcp_a_reset_is_a_lost_peer_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    link = Link(ours, 3, Owner())
    other.sendall(b"head")
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()
    with pytest.raises(PeerLost, match="reset"):
        link.recv_into(20, memoryview(bytearray(20)))
    link.close()


def test_a_link_takes_the_descriptor_over() -> None:
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/dev/fd"))
    link = Link(ours, 0, Owner())
    assert ours.fileno() == -1
    assert len(os.listdir("/dev/fd")) == before
    link.close(), theirs.close()
    assert len(os.listdir("/dev/fd")) == before - 2
