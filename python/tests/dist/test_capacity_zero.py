"""No deadlock by design: every collective runs on links that hold nothing.

On such a link a send returns only when its receiver has taken the message.  What runs here needs no
buffer anywhere, however large the message and small the pipe.
"""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dist_worlds import data, ring_sum

from tinyllm.dist import CommTimeout, diagnosis
from tinyllm.dist.board import Board
from tinyllm.dist.comm import Comm
from tinyllm.dist.link import GLANCE
from tinyllm.dist.port import Port


class Meeting:
    """One direction between two ranks: a message changes hands when both are there."""

    def __init__(self) -> None:
        self.offered: queue.Queue = queue.Queue()
        self.taken: queue.Queue = queue.Queue()


class RendezvousLink:
    """What a Port needs of a Link, with a capacity of zero."""

    def __init__(self, peer: int, owner: Port, outgoing: Meeting, incoming: Meeting) -> None:
        self.peer, self.owner = peer, owner
        self.outgoing, self.incoming = outgoing, incoming
        self.rest = b""

    def send(self, head, body) -> None:
        self.outgoing.offered.put(bytes(head) + body.tobytes())
        self._wait(self.outgoing.taken, sending=True)

    def recv_into(self, total, *buffers) -> None:
        if not self.rest:
            self.rest = self._wait(self.incoming.offered, sending=False)
        for buffer in buffers:
            flat = memoryview(buffer.view(np.uint8) if isinstance(buffer, np.ndarray) else buffer)
            flat[:] = self.rest[: len(flat)]
            self.rest = self.rest[len(flat) :]
        if not self.rest:
            self.incoming.taken.put(None)

    def _wait(self, event: queue.Queue, sending: bool):
        while True:
            try:
                return event.get(timeout=GLANCE)
            except queue.Empty:
                self.owner.waiting(self.peer, sending=sending, done=0)


def on_empty_links(world: int, fn, comm_class=Comm, limit: float = 10.0) -> list:
    """``fn(comm)`` in a thread per rank, over links of capacity zero."""
    board = Board(world)
    meetings = {(a, b): Meeting() for a in range(world) for b in range(world)}

    def rank(me: int):
        port = Port(me, [None] * world, board)
        for peer in set(range(world)) - {me}:
            port._links[peer] = RendezvousLink(peer, port, meetings[me, peer], meetings[peer, me])
        comm = comm_class(port)
        comm.timeout = limit
        return fn(comm)

    try:
        with ThreadPoolExecutor(world) as pool:
            futures = [pool.submit(rank, me) for me in range(world)]
        errors = [future.exception() for future in futures if future.exception()]
        if errors:  # the first one saw all others still waiting
            raise min(errors, key=lambda error: "→" not in str(error))
        return [future.result() for future in futures]
    finally:
        board.close()


def all_collectives(comm: Comm) -> None:
    for n in (0, 1, comm.world - 1, 3 * comm.world + 1):
        parts = [data(rank, n) for rank in range(comm.world)]
        total, mine = ring_sum(parts), parts[comm.rank]
        assert np.array_equal(comm.all_reduce(mine), total)
        chunk = comm.reduce_scatter(mine)
        assert np.array_equal(chunk, np.array_split(total, comm.world)[comm.rank])
        assert np.array_equal(comm.all_gather(chunk), total)
    for src in range(comm.world):
        got = comm.broadcast(data(src, 5) if comm.rank == src else None, src)
        assert np.array_equal(got, data(src, 5))
    comm.barrier()


@pytest.mark.parametrize("world", range(2, 17))
def test_every_collective_needs_no_buffer(world: int) -> None:
    on_empty_links(world, all_collectives)


class EveryoneSendsFirst(Comm):
    """The ring without the parity rule."""

    def _exchange(self, outgoing, into, add=None):
        self._send(self._right, outgoing)
        return self._port.receive(self._left, into, add)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_without_the_parity_rule_it_hangs_and_says_who_waits_for_whom(world: int) -> None:
    with pytest.raises(CommTimeout) as caught:
        on_empty_links(world, lambda comm: comm.barrier(), EveryoneSendsFirst, limit=0.3)
    ring = " → ".join(map(str, [*range(world), 0]))
    assert f"{ring}: each is sending and none receives" in str(caught.value)
    assert caught.value.rank is None, "in a circle, nobody is the culprit"


def test_the_circle_is_found_among_others_that_wait() -> None:
    from tinyllm.dist.board import RECEIVING, RUNNING, SENDING, Entry

    entries = [
        Entry(0, RECEIVING, 1),
        Entry(1, SENDING, 2),
        Entry(2, RECEIVING, 3),
        Entry(3, SENDING, 1),
        Entry(4, RUNNING),
    ]
    assert diagnosis.cycle(entries) == [1, 2, 3]
    assert diagnosis.drawn(entries, [1, 2, 3]) == "1 → 2 → 3 → 1: each waits for the next"
    assert diagnosis.cycle(entries[:3]) == []
