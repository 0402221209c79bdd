"""What is timed: a collective with its arrays on one rank, and what its result has to be.

Every rank fills its input from a *wave*, a sequence of small whole numbers that repeats after a
prime number of entries, and begins it elsewhere in every turn:

    entry i of rank r in turn t  =  wave[i + 5 r + 3 t]

The wave is k³ mod 127 mod 16: shifted copies of it, or of a sum of such, agree in one entry of nine
at the most.  So a chunk in a wrong place, a rank that is counted twice, and the result of the turn
before are wrong entries; and sums are exact in every dtype and order, so that results are compared
with ``==``.  What all waves add up to repeats like a wave: input and expected result are windows of
arrays that are made once, and writing or comparing them takes no longer than a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.dist import Comm, algorithms, chunk_bounds

Array = NDArray[Any]

PERIOD = 127  # entries; prime, so that no chunk begins like another
RANK, TURN = 5, 3  # entries by which the next rank's and the next turn's wave are ahead
SMALL = 16  # all numbers are below; 128 ranks' add up exactly in float16
STALE = 99  # stands in the output before


@dataclass(frozen=True)
class Kind:
    """What is called, whatever the number of entries."""

    collective: str
    algorithm: str = "ring"  # of all_reduce; "ring" is the Comm's own way
    op: str = "sum"  # or "mean"; of all_reduce
    dtype: str = "float64"


class Case:
    """One collective on arrays of ``count`` entries in all: fill, call, compare, turn after turn.

    In place, input and output share memory as they do in NCCL: they are the same array, or the
    smaller one is this rank's chunk of the larger; and they are symmetric arrays (``comm.empty``)
    where the Comm has such.
    """

    in_place_too = True
    trips = 1  # how often the bytes cross between ranks in one call, one after the other

    def __init__(self, comm: Comm, kind: Kind, count: int, in_place: bool = False) -> None:
        self.comm = comm
        self.kind = kind
        self.count = count
        self.in_place = in_place
        self.bounds = chunk_bounds(count, comm.world)
        self.own = slice(*self.bounds[comm.rank])
        self.symmetric = in_place and getattr(type(comm), "empty", Comm.empty) is not Comm.empty
        self.x, self.out = self._arrays()
        # A mean divides by world, in float16 before it adds: let all numbers be multiples of it.
        scale = comm.world if kind.op == "mean" else 1
        wave = np.arange(PERIOD) ** 3 % PERIOD % SMALL * scale
        total = np.sum([np.roll(wave, -RANK * rank) for rank in range(comm.world)], axis=0) // scale
        self._wave = np.resize(wave.astype(kind.dtype), count + PERIOD)
        self._total = np.resize(total.astype(kind.dtype), count + PERIOD)

    def fill(self, turn: int) -> None:
        """Write this turn's input, and something else into the output."""
        self.out.fill(STALE)
        self.x[:] = self._input(turn)

    def call(self) -> None:
        """Do what is timed."""
        raise NotImplementedError

    def wrong(self, turn: int) -> int:
        """The number of entries that are not what they should be."""
        return sum(int(np.count_nonzero(got != due)) for got, due in self._results(turn))

    def wave(self, rank: int, turn: int) -> Array:
        """``count`` entries of a rank's wave."""
        start = (RANK * rank + TURN * turn) % PERIOD
        return self._wave[start : start + self.count]

    def total(self, turn: int) -> Array:
        """``count`` entries of the sum, or mean, of all ranks' waves."""
        start = TURN * turn % PERIOD
        return self._total[start : start + self.count]

    def _arrays(self) -> tuple[Array, Array]:
        """Input and output."""
        x = self._room(self.count)
        return x, x if self.in_place else self._room(self.count)

    def _input(self, turn: int) -> Array:
        return self.wave(self.comm.rank, turn)

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        """Pairs of what there is and what is due."""
        raise NotImplementedError

    def _room(self, count: int) -> Array:
        empty: Any = self.comm.empty if self.symmetric else np.empty
        room: Array = empty(count, np.dtype(self.kind.dtype))
        return room


class AllReduce(Case):
    """The sum or mean of all arrays, on every rank."""

    def call(self) -> None:
        """Comm.all_reduce, or another algorithm's."""
        if self.kind.algorithm == "ring":
            self.comm.all_reduce(self.x, self.kind.op, out=self.out)
        else:
            algorithms.all_reduce(
                self.comm, self.x, self.kind.op, self.kind.algorithm, out=self.out
            )

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        yield self.out, self.total(turn)


class ReduceScatter(Case):
    """Every rank brings ``count`` entries and gets its chunk of the sum."""

    def call(self) -> None:
        """Comm.reduce_scatter."""
        self.comm.reduce_scatter(self.x, out=self.out)

    def _arrays(self) -> tuple[Array, Array]:
        x = self._room(self.count)
        return x, x[self.own] if self.in_place else self._room(x[self.own].size)

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        yield self.out, self.total(turn)[self.own]


class AllGather(Case):
    """Every rank brings its chunk and gets all ``count`` entries."""

    def call(self) -> None:
        """Comm.all_gather."""
        self.comm.all_gather(self.x, out=self.out)

    def _arrays(self) -> tuple[Array, Array]:
        out = self._room(self.count)
        return out[self.own] if self.in_place else self._room(out[self.own].size), out

    def _input(self, turn: int) -> Array:
        return self.wave(self.comm.rank, turn)[self.own]

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        for rank, (start, stop) in enumerate(self.bounds):
            yield self.out[start:stop], self.wave(rank, turn)[start:stop]


class Broadcast(Case):
    """Rank 0's array, on every rank."""

    def call(self) -> None:
        """Comm.broadcast from rank 0."""
        self.comm.broadcast(self.x, 0, out=self.out)

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        yield self.out, self.wave(0, turn)


class SendRecv(Case):
    """Ping-pong: 0 and 1, 2 and 3, ... send their arrays to each other, the even rank first.

    What ``recv`` returns is a fresh array, so there is no in-place.
    """

    in_place_too = False
    trips = 2

    def call(self) -> None:
        """There and back."""
        partner = self.comm.rank ^ 1
        if partner >= self.comm.world:  # nobody is left for the last of an odd number
            return
        if partner > self.comm.rank:
            self.comm.send(self.x, partner)
            self.out = self.comm.recv(partner)
        else:
            self.out = self.comm.recv(partner)
            self.comm.send(self.x, partner)

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        if self.comm.rank ^ 1 < self.comm.world:
            yield self.out, self.wave(self.comm.rank ^ 1, turn)


class Barrier(Case):
    """Nothing but the wait for each other."""

    in_place_too = False

    def call(self) -> None:
        """Comm.barrier."""
        self.comm.barrier()

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        yield from ()


class Memcpy(Case):
    """All ranks copy ``count`` entries at the same time: faster than that no bytes can move."""

    in_place_too = False

    def call(self) -> None:
        """A copy within the rank."""
        np.copyto(self.out, self.x)

    def _results(self, turn: int) -> Iterator[tuple[Array, Array]]:
        yield self.out, self.wave(self.comm.rank, turn)


CASES: dict[str, type[Case]] = {
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "broadcast": Broadcast,
    "sendrecv": SendRecv,
    "barrier": Barrier,
}
