"""The board: one slot per rank, in memory that the parent shares with its ranks.

A rank writes into its own slot which operation it is in and whom it waits for; it never waits for
the board and never reads a clock for it.  When a run is stuck the parent reads all slots, also
those of ranks that are stopped or stuck in C, and can say who waits for whom.

    slot = | doing | peer |  header of the current or the last operation (frame.SIZE bytes)  |
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from tinyllm.dist import frame

# What a rank is doing. Waiting adds the peer that the rank waits for.
STARTING, RUNNING, INSIDE, RECEIVING, SENDING, RETURNED = range(6)

_SLOT = 640  # whole cache lines, so that ranks do not disturb each other


class Slot:
    """One rank's place on the board, as that rank writes it."""

    def __init__(self, view: memoryview) -> None:
        self._words = view[:16].cast("q")
        self._head = view[16 : 16 + frame.SIZE]

    def enter(self, head: bytearray) -> None:
        """The rank begins the operation that ``head`` describes."""
        self._head[:] = head
        self._words[0] = INSIDE

    def mark(self, doing: int, peer: int = -1) -> None:
        """The rank's state changes; ``peer`` is whom it waits for."""
        self._words[1] = peer
        self._words[0] = doing


class Entry(NamedTuple):
    """One rank's slot, as others read it."""

    rank: int
    doing: int
    peer: int
    operation: str

    def __str__(self) -> str:
        """``rank 2 is in all_reduce #3 (float64[35], sum), waiting for a message from rank 1``."""
        if self.doing == STARTING:
            return f"rank {self.rank} is starting"
        if self.doing == RETURNED:
            return f"rank {self.rank} has returned"
        if self.doing == RUNNING:
            last = (
                f"its last operation was {self.operation}" if self.operation else "no operation yet"
            )
            return f"rank {self.rank} is in its own code ({last})"
        wait = {
            INSIDE: "",
            RECEIVING: f", waiting for a message from rank {self.peer}",
            SENDING: f", waiting for rank {self.peer} to take a message",
        }[self.doing]
        return f"rank {self.rank} is in {self.operation}{wait}"


class Board:
    """All ranks' slots; pickles into Process arguments, and only there."""

    def __init__(self, world: int, fd: int | None = None) -> None:
        self.world = world
        self._fd = _anonymous_file(world * _SLOT) if fd is None else fd
        self._map = mmap.mmap(self._fd, world * _SLOT)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.world, DupFd(self._fd))

    def slot(self, rank: int) -> Slot:
        """The slot that rank ``rank`` writes."""
        return Slot(memoryview(self._map)[rank * _SLOT : (rank + 1) * _SLOT])

    def read(self, rank: int) -> Entry:
        """What rank ``rank`` last wrote."""
        slot = memoryview(self._map)[rank * _SLOT : (rank + 1) * _SLOT]
        doing, peer = slot[:16].cast("q")
        head = bytes(slot[16 : 16 + frame.SIZE])
        operation = str(frame.unpack(head)) if any(head) else ""
        return Entry(rank, doing, peer, operation)

    def close(self) -> None:
        """Give the descriptors back, and the memory if no slot of it is in use here."""
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _attach(world: int, fd: Any) -> Board:
    return Board(world, fd.detach())


def _anonymous_file(size: int) -> int:
    """A descriptor of shared memory that has no name, so that nothing can be left behind."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tinyllm-board")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
