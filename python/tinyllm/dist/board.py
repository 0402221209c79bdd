"""The board: one slot per rank, in memory that the parent shares with its ranks.

A rank writes into its own slot which operation it is in and whom it waits for.  It never waits for
the board, and reads it only when it has waited for a message for a while.  When a run is stuck the
parent reads all slots, also those of ranks that are stopped or stuck in C.

    | alarm | slot 0 | slot 1 | ...

    slot = | doing, peer, witness, broken, blamed | header | testimony | sent | received |

``header`` is that of the current or the last operation.  ``testimony`` is the header of a message
that did not belong to it, and ``witness`` the rank that sent it.  ``sent`` and ``received`` count
messages of send and recv by peer.  Beside ``doing`` stands the checksum of the header, without its
numbers.  While the owner writes the header no checksum fits, and the slot is read again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from tinyllm.dist import frame
from tinyllm.dist.frame import Frame

# What a rank is doing.  Those that wait add the peer that they wait for.
STARTING, RUNNING, INSIDE, RECEIVING, SENDING, RETURNED, FAILED = range(7)

_LINE = 64  # bytes; a cache line, so that ranks do not disturb each other
DOING, _PEER, _WITNESS, _BROKEN, _BLAMED = range(5)  # where they stand among a slot's words
_KINDS = 8  # bits that ``doing`` takes; the checksum takes 32 above them
WRITING = INSIDE | 1 << 62  # which no checksum fits
_LOOKS, _NAP = 600, 30  # at a slot while its owner writes, and between which to sleep


class Entry(NamedTuple):
    """One rank's slot, as others read it."""

    rank: int
    doing: int
    peer: int = -1
    frame: Frame | None = None  # of the current or the last operation
    testimony: tuple[int, Frame] | None = None  # who sent what this rank could not use
    sent: tuple[int, ...] = ()  # messages of send, by destination
    received: tuple[int, ...] = ()  # messages of recv, by source
    broken: bool = False  # an operation failed
    blamed: int | None = None  # whose fault that was, as far as this rank knows

    @property
    def waits(self) -> bool:
        """Whether the rank waits for ``peer``."""
        return self.doing in (RECEIVING, SENDING)

    @property
    def is_in_collective(self) -> bool:
        """Whether the current or last operation is a collective."""
        return self.frame is not None and self.frame.is_collective

    @property
    def whereabouts(self) -> str:
        """The operation, or where the rank left off."""
        return f"returned after #{self.collectives}" if self.doing == RETURNED else str(self.frame)

    @property
    def collectives(self) -> int:
        """How many collectives the rank has begun."""
        return self.frame.seq if self.frame else 0

    def __str__(self) -> str:
        """``rank 2 is in all_reduce #3 (float64[35], sum), waiting for a message from rank 1``."""
        last = f"the last operation was {self.frame}" if self.frame else "no operation yet"
        words = {
            STARTING: "is starting",
            RUNNING: f"is in its own code ({last})",
            INSIDE: f"is in {self.frame}",
            RECEIVING: f"is in {self.frame}, waiting for a message from rank {self.peer}",
            SENDING: f"is in {self.frame}, waiting for rank {self.peer} to take a message",
            RETURNED: f"has returned ({last})",
            FAILED: f"failed in {self.frame}",
        }
        return f"rank {self.rank} {words[self.doing]}"


def stamp(doing: int, head: bytes | bytearray) -> int:
    """What a rank does, and the checksum of the header of the operation."""
    return doing | frame.checksum(head) << _KINDS


class Slot:
    """One rank's place on the board, as that rank writes it."""

    def __init__(self, memory: memoryview, world: int) -> None:
        self.words = memory[:_LINE].cast("q")
        self.head = memory[_LINE : _LINE + frame.SIZE]
        self._testimony = memory[_LINE + frame.SIZE : _LINE + 2 * frame.SIZE]
        counts = memory[_LINE + 2 * frame.SIZE :].cast("Q")
        self.sent = counts[:world]
        self.received = counts[world : 2 * world]

    def enter(self, head: bytearray) -> None:
        """The rank begins the operation that ``head`` describes; Port does this by itself."""
        begun = stamp(INSIDE, head)
        self.words[DOING] = WRITING
        self.head[:] = head
        self.words[DOING] = begun

    def forget(self) -> None:
        """As if there had been no operation yet."""
        self.words[DOING] = RUNNING

    def mark(self, doing: int, peer: int = -1) -> None:
        """What the rank does now; ``peer`` is whom it waits for."""
        self.words[_PEER] = peer
        self.words[DOING] = self.words[DOING] >> _KINDS << _KINDS | doing

    def fail(self, blamed: int | None) -> None:
        """The operation failed, over ``blamed``: no later message of this rank can be trusted."""
        self.words[_BLAMED] = 0 if blamed is None else blamed + 1
        self.words[_BROKEN] = 1
        self.mark(FAILED)

    def testify(self, witness: int, head: bytes) -> None:
        """A message of ``witness`` did not belong to the rank's operation; this was its header."""
        self._testimony[:] = head
        self.words[_WITNESS] = witness + 1

    def read(self, rank: int) -> Entry:
        """What the slot says, and not half of it."""
        for look in range(1, _LOOKS):
            word, peer, witness, broken, blamed, *_ = self.words
            head, again = bytes(self.head), (bytes(self.head), self.words[DOING])
            doing = word & (1 << _KINDS) - 1
            whole = word in (doing, stamp(doing, head))  # the former: no operation yet
            if whole and again == (head, word):
                break
            if look % _NAP == 0:  # perhaps it was interrupted
                time.sleep(1e-3)
        told = (witness - 1, frame.unpack(self._testimony)) if witness else None
        return Entry(
            rank,
            doing,
            peer,
            frame.unpack(head) if word != doing else None,
            told,
            tuple(self.sent),
            tuple(self.received),
            bool(broken),
            blamed - 1 if blamed else None,
        )


class Board:
    """All ranks' slots, and the alarm; pickles into Process arguments, and only there."""

    def __init__(self, world: int, fd: int | None = None) -> None:
        self.world = world
        size = _LINE + 2 * frame.SIZE + 16 * world
        self._slot_size = -size // _LINE * -_LINE
        total = _LINE + world * self._slot_size
        self._fd = anonymous_file("tinyllm board", total) if fd is None else fd
        self._map = mmap.mmap(self._fd, total)
        # In a rank's process: what is left to do when its function has returned.
        self.at_end: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.world, DupFd(self._fd))

    def slot(self, rank: int) -> Slot:
        """The slot of rank ``rank``."""
        start = _LINE + rank * self._slot_size
        return Slot(memoryview(self._map)[start : start + self._slot_size], self.world)

    def alarm(self) -> memoryview:
        """One word that is not 0 once a rank knows that the ranks are not in the same call."""
        return memoryview(self._map)[:8].cast("q")

    def read(self) -> list[Entry]:
        """What all ranks last wrote."""
        return [self.slot(rank).read(rank) for rank in range(self.world)]

    def close(self) -> None:
        """Give the descriptors back, and the memory if no slot of it is in use here."""
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _attach(world: int, fd: Any) -> Board:
    return Board(world, fd.detach())


def anonymous_file(name: str, size: int = 0) -> int:
    """A descriptor of a file that has no path, so that nothing of it can be left behind."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
