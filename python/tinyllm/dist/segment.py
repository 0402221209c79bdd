"""The memory that ranks share, and how they meet in it.

    | cards of rank 0 | cards of rank 1 | ... | trays of rank 0 | trays of rank 1 | ...

    cards = | even card | odd card |     card = | turn | header of the operation | word |
    trays = | even tray | odd tray |     tray = TRAY bytes for the others to read

All ranks meet again and again; these are the *turns*.  Before turn t a rank lays what it has for
the others on its tray; then it writes its operation's header on its card, and last the number t
of the turn.  Once it has read t, or more, on every other card, and the headers are its own, it
reads the other trays.  It may not write on its own again, since others still read: so it goes on
with the other card and tray.  When it comes back to the first, in turn t + 2, all have been in
turn t + 1, and are done with turn t.

*Data, then number* is all the order that this takes, and x86 keeps it: its stores become visible
in program order and its loads happen in program order, and Python, which runs one bytecode after
the other, does not reorder either (the C library end a copy that goes past the cache by a fence).
Other processors promise neither.  There each rank sends every other one an empty message through
their pipe when it has written its number, and waits for theirs: the kernel's locks keep the order,
at the price of some system calls.

Memory is reserved when it is made, so that where there is none, an OSError says so: a file that is
merely made longer end a rank by SIGBUS when it first touches what is not there.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from tinyllm.dist import frame
from tinyllm.dist.arrays import Array
from tinyllm.dist.board import anonymous_file
from tinyllm.dist.frame import Frame
from tinyllm.dist.link import GLANCE
from tinyllm.dist.port import Port

TRAY = 1 << 20  # bytes; what is larger goes in pieces, which stay in the cache between the ranks

_ORDERED = platform.machine() in ("x86_64", "AMD64")
_CARD = 640  # bytes: whole cache lines, so that ranks do not disturb each other
_WORD = _CARD - 8  # where a number stands that goes along with the header
_SPINS = 20  # looks at a card before giving way: a peer that runs needs a microsecond or two
_YIELDS = 60  # looks that give way to others in between, before sleeping
_LONGEST = 0.005  # seconds of one sleep; shorter ones are an eighth of what has been waited so far

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def reserved_file(name: str, size: int) -> int:
    """The descriptor of a file without a path whose ``size`` bytes are there; OSError if not."""
    fd = anonymous_file(name)
    try:
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise OSError(
            error.errno, f"no room for {size:,} bytes of shared memory: {error.strerror}"
        ) from error
    return fd


def mapped(fd: int, size: int) -> mmap.mmap:
    """The file's memory, with its pages at hand where the system can do that at once."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


class Segment:
    """The descriptor of a world's memory; pickles into Process arguments, and only there."""

    _fd = -1

    def __init__(self, world: int, fd: int | None = None) -> None:
        self.world = world
        self.size = 2 * world * (_CARD + TRAY)
        self._fd = reserved_file("tinyllm segment", self.size) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.world, DupFd(self._fd))

    def copy(self) -> Segment:
        """The same memory by a descriptor of its own."""
        return Segment(self.world, os.dup(self._fd))

    def open(self) -> mmap.mmap:
        """The memory; the descriptor is not needed after that."""
        memory = mapped(self._fd, self.size)
        self.close()
        return memory

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    __del__ = close


def _attach(world: int, fd: Any) -> Segment:
    return Segment(world, fd.detach())


class Table:
    """One rank's side of the segment: its place at the table where all meet."""

    def __init__(self, segment: Segment, port: Port) -> None:
        self.rank, self.world = port.rank, port.world
        self.turn = 0  # the turn that this rank prepares
        self._port = port
        self._map = segment.open()
        end = 2 * self.world * _CARD
        self._cards = [list(range(start, end, 2 * _CARD)) for start in (0, _CARD)]
        self._numbers = memoryview(self._map)[:end].cast("q")
        self._peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        self._views: dict[np.dtype[Any], list[list[Array]]] = {}

    def trays(self, dtype: np.dtype[Any], turn: int) -> list[Array]:
        """What the ranks lay out for ``turn``, by rank, as flat arrays."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = [
                [self._tray(rank, parity, dtype) for rank in range(self.world)] for parity in (0, 1)
            ]
        return views[turn & 1]

    def _tray(self, rank: int, parity: int, dtype: np.dtype[Any]) -> Array:
        start = 2 * self.world * _CARD + (2 * rank + parity) * TRAY
        return np.frombuffer(self._map, dtype, TRAY // dtype.itemsize, start)

    def meet(self, word: int | None = None) -> None:
        """Take the turn: return when all ranks have, and all are in the same operation.

        A ``word`` goes along, for the others to read with ``words``.
        """
        turn, memory, numbers = self.turn, self._map, self._numbers
        self.turn = turn + 1
        cards = self._cards[turn & 1]
        size = self._port.call.size
        head = self._port.head[:size]
        card = cards[self.rank]
        memory[card + 8 : card + 8 + size] = head
        if word is not None:
            numbers[(card + _WORD) >> 3] = word
        numbers[card >> 3] = turn + 1  # a card that nobody has written on says 0
        if not _ORDERED:
            self._call_round()
        for peer in self._peers:
            card = cards[peer]
            if numbers[card >> 3] <= turn:
                self._await(peer, card >> 3, turn)
            if memory[card + 8 : card + 8 + size] != head:
                self._port.agree(peer, self._head(card))

    def frame_of(self, rank: int) -> Frame:
        """The operation with which ``rank`` came to the last turn."""
        return frame.unpack(self._head(self._cards[(self.turn - 1) & 1][rank]))

    def words(self) -> list[int]:
        """The words with which the ranks came to the last turn."""
        return [self._numbers[(card + _WORD) >> 3] for card in self._cards[(self.turn - 1) & 1]]

    def _head(self, card: int) -> bytes:
        return self._map[card + 8 : card + 8 + frame.SIZE]

    # -- waiting ---------------------------------------------------------------------------------

    def _await(self, peer: int, index: int, turn: int) -> None:
        """Wait for ``peer`` to take the turn: look, give way and look, sleep and look around."""
        numbers = self._numbers
        for _ in range(_SPINS):
            if numbers[index] > turn:
                return
        for _ in range(_YIELDS):
            _give_way()
            if numbers[index] > turn:
                return
        began = glanced = time.monotonic()
        while numbers[index] <= turn:
            gone = self._port.has_hung_up(peer)
            if numbers[index] > turn:  # it did so after that
                return
            if gone:
                raise self._port.lost(peer, "it closed the connection")
            now = time.monotonic()
            if now - glanced > GLANCE:
                glanced = now
                self._port.waiting(peer, sending=False, done=0)
            time.sleep(min((now - began) / 8, _LONGEST))

    def _call_round(self) -> None:
        """Let every other rank know by a message, and wait for theirs."""
        for peer in self._peers:
            self._port.nod(peer)
        for peer in reversed(self._peers):
            self._port.await_nod(peer)
