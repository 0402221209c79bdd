"""The memory that ranks share, and how they meet in it.

    | cards of rank 0 | cards of rank 1 | ... | trays of rank 0 | trays of rank 1 | ...

    cards = | even card | odd card |            card = | turn | mark | word | header |
    trays = | even tray | odd tray | slate |    each of TRAY bytes

All ranks meet again and again; these are the *turns*.  Before turn t a rank lays what it has for
the others on the trays of that turn, its own or others', a place for each; then it writes on its
card the mark of its operation, which is the same on all ranks in the same operation, and last the
number t.  Once it has read t, or more, on every other card, and the marks are its own, it reads
the trays.  For turn t + 1 nobody may write there, since others still read: it has trays and cards
of its own.  For turn t + 2 they may: who prepares that has met all others in turn t + 1, and so
they are done with turn t.

A slate has no turns.  Its owner writes, all meet, others read each their part and write the answer
in its place, all meet again, and only the owner reads.  That saves more than space: to write on a
cache line that another core has last read takes 4 to 10 times as long as on one that it has last
written (7 to 28 ns and 2; measured on an AMD EPYC).

*Data, then number* is all the order that this takes, and x86 keeps it: its stores become visible
in program order and its loads happen in program order, and Python, which runs one bytecode after
the other, does not reorder either (the C library ends a copy that goes past the cache by a fence).
Other processors promise neither.  There each rank sends every other one an empty message through
their pipe when it has written its number, and waits for theirs: the kernel's locks keep the order,
at the price of some system calls.

Memory is reserved when it is made, so that where there is none, an OSError says so: a file that is
merely made longer ends a rank by SIGBUS when it first touches what is not there.
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
_MARK, _WORD = 1, 2  # where on the card they stand, in numbers of 8 bytes
_HEAD = 64  # and where the header does, in bytes
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

    def __init__(self, world: int, crowded: bool, fd: int | None = None) -> None:
        self.world = world
        self.crowded = crowded  # more ranks than cores: they had better not wait for each other
        self.size = world * (2 * _CARD + 3 * TRAY)
        self._fd = reserved_file("tinyllm segment", self.size) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.world, self.crowded, DupFd(self._fd))

    def copy(self) -> Segment:
        """The same memory by a descriptor of its own."""
        return Segment(self.world, self.crowded, os.dup(self._fd))

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


def _attach(world: int, crowded: bool, fd: Any) -> Segment:
    return Segment(world, crowded, fd.detach())


class Table:
    """One rank's side of the segment: its place at the table where all meet."""

    def __init__(self, segment: Segment, port: Port) -> None:
        self.rank, self.world = port.rank, port.world
        self.turn = 1  # the turn that this rank prepares
        self._port = port
        self._map = segment.open()
        self._numbers = memoryview(self._map)[: 2 * self.world * _CARD].cast("q")
        self.peers = [(self.rank + step) % self.world for step in range(1, self.world)]
        size = _CARD // self._numbers.itemsize
        self._cards = [range(parity * size, len(self._numbers), 2 * size) for parity in (0, 1)]
        self._rounds = [  # where one's own numbers stand, and where the others', by rank
            (cards[self.rank], [(peer, cards[peer], cards[peer] + _MARK) for peer in self.peers])
            for cards in self._cards
        ]
        self._words = [self._numbers[cards.start + _WORD :: cards.step] for cards in self._cards]
        self._spins = 0 if segment.crowded else _SPINS
        self._views: dict[np.dtype[Any], list[list[Array]]] = {}

    def trays(self, dtype: np.dtype[Any], turn: int) -> list[Array]:
        """What the ranks lay out for ``turn``, by rank, as flat arrays."""
        return self._arrays(dtype)[turn & 1]

    def tray(self, dtype: np.dtype[Any]) -> Array:
        """Where this rank lays out what it has for the turn to come."""
        return self.trays(dtype, self.turn)[self.rank]

    def laid(self, dtype: np.dtype[Any]) -> list[Array]:
        """What all ranks have laid out for the last turn."""
        return self.trays(dtype, self.turn - 1)

    def slates(self, dtype: np.dtype[Any]) -> list[Array]:
        """All ranks' slates, as flat arrays."""
        return self._arrays(dtype)[2]

    def _arrays(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """Even trays, odd trays, slates, each by rank."""
        views = self._views.get(dtype)
        if views is None:
            begin, size = 2 * self.world * _CARD, TRAY // dtype.itemsize
            starts = [begin + (3 * np.arange(self.world) + kind) * TRAY for kind in range(3)]
            views = self._views[dtype] = [
                [np.frombuffer(self._map, dtype, size, start) for start in by_rank]
                for by_rank in starts
            ]
        return views

    def meet(self) -> None:
        """Take the turn: return when all ranks have, and all are in the same operation."""
        turn, numbers, port = self.turn, self._numbers, self._port
        mine, others = self._rounds[turn & 1]
        mark = port.call.mark + port.seq
        numbers[mine + _MARK] = mark
        numbers[mine] = turn  # last: who sees it sees the rest
        if not _ORDERED:
            self._call_round()
        for peer, card, its_mark in others:
            if numbers[card] < turn:
                self._await(card, peer, turn)
            if numbers[its_mark] != mark:
                raise port.disagreement(peer)
        self.turn = turn + 1

    def tell(self, word: int) -> list[int]:
        """Take the turn, and a number along; return the numbers of all ranks."""
        parity = self.turn & 1
        self._numbers[self._cards[parity][self.rank] + _WORD] = word
        self.meet()
        return self._words[parity].tolist()

    def show(self) -> None:
        """Lay the operation's header on the card, for the others to read with ``shown``."""
        start = self._cards[self.turn & 1][self.rank] * self._numbers.itemsize + _HEAD
        self._map[start : start + frame.SIZE] = self._port.call.head

    def shown(self, rank: int) -> Frame:
        """What ``rank`` showed at the last turn; DesyncError unless it belongs to our operation."""
        start = self._cards[(self.turn - 1) & 1][rank] * self._numbers.itemsize + _HEAD
        return self._port.agree(rank, self._map[start : start + frame.SIZE])

    # -- waiting ---------------------------------------------------------------------------------

    def _await(self, card: int, peer: int, turn: int) -> None:
        """Wait for ``peer`` to take the turn: look, give way and look, sleep and look around."""
        numbers = self._numbers
        for _ in range(self._spins):
            if numbers[card] >= turn:
                return
        for _ in range(_YIELDS):
            _give_way()
            if numbers[card] >= turn:
                return
        began = glanced = time.monotonic()
        while numbers[card] < turn:
            gone = self._port.has_hung_up(peer)
            if numbers[card] >= turn:  # it did so after that
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
        for peer in self.peers:
            self._port.nod(peer)
        for peer in reversed(self.peers):
            self._port.await_nod(peer)
