"""Sums in shared memory, prepared once for each kind of array: one shape, dtype and op.

What Python does before and after an addition takes longer than to add up a few thousand numbers.
So the views of everybody's memory are made when a kind is first seen; a call then copies, meets the
others, and adds.  Each chunk is added up in the ring's order.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm, chunk_bounds
from tinyllm.dist.segment import TRAY, Table
from tinyllm.dist.symmetric import Part, SymmetricArrays

BLOCK = 256 << 10  # bytes that a push adds at a time: they stay in the cache for the stores

_add, _divide = np.add, np.divide


class Plan:
    """The all-reduce of one kind of array."""

    is_one_piece = True  # x is read before the result is written, or in the same call of NumPy

    def __init__(
        self, comm: Comm, table: Table, arrays: SymmetricArrays, like: Array, op: str
    ) -> None:
        self.call = comm._port.known("all_reduce", like, op)
        self._comm, self._table, self._arrays, self._world = comm, table, arrays, comm.world
        self._divides_first = op == "mean" and like.dtype == np.float16  # its sum may be infinite
        self._count: Array | None = None  # by which the sum is divided: faster than by an int
        if op == "mean" and not self._divides_first:
            self._count = np.array(comm.world, like.dtype)
        self._prepare(like)

    def _prepare(self, like: Array) -> None:
        """Make all views that a call needs."""
        raise NotImplementedError

    def run(self, x: Array, result: Array) -> None:
        """Make ``result``, contiguous, the sum, or mean, of all ranks' ``x``."""
        raise NotImplementedError


class OneShot(Plan):
    """Small arrays: every rank lays all of its own out, and adds everybody's up.

    What lies on tray k are the k-th terms of the sums: chunk j of rank r goes to tray r - j - 1.
    So the ring's order is kept for each chunk, and yet whole trays are added.
    """

    def _prepare(self, like: Array) -> None:
        self._nbytes = like.nbytes
        # Sums are not added up in place: with one entry NumPy takes four times as long for that.
        self._sums = np.empty_like(like), np.empty_like(like)
        self._turns = [self._views(self._table.trays(like.dtype, turn)) for turn in (0, 1)]

    def _views(self, trays: list[Array]) -> tuple[Any, ...]:
        """The chunks of x and their places on the trays; the trays, and where their sums go."""
        x, rank, world = self._sums[0], self._comm.rank, self._world
        chunks = [
            (x.reshape(-1)[start:stop], trays[(rank - j - 1) % world][start:stop])
            for j, (start, stop) in enumerate(chunk_bounds(x.size, world))
            if start < stop
        ]
        first, *middle, last = [tray[: x.size].reshape(x.shape) for tray in trays]
        return chunks, first, list(zip(middle, cycle(self._sums), strict=False)), last

    def run(self, x: Array, result: Array) -> None:
        """Make ``result`` the sum or mean of all ranks' ``x``."""
        table = self._table
        chunks, total, middle, last = self._turns[table.turn & 1]
        mine = self._sums[0]
        if self._divides_first:
            x = _divide(x, self._world)
        mine[...] = x
        for chunk, place in chunks:
            place[...] = chunk
        self._comm.bytes_sent += self._nbytes
        table.meet()
        for term, partial in middle:
            total = _add(total, term, partial)
        if self._count is not None:
            _divide(_add(total, last), self._count, result)
        else:
            _add(total, last, result)


class OneShotOfTwo(Plan):
    """The same with one other rank: the order of two terms does not matter to their sum."""

    def _prepare(self, like: Array) -> None:
        rank = self._comm.rank
        self._nbytes = like.nbytes
        self._is_first = rank == 0
        self._is_one_entry = like.size == 1
        self._sum = np.empty_like(like)
        self._turns = []
        for turn in (0, 1):
            trays = self._table.trays(like.dtype, turn)
            both = [tray[: like.size].reshape(like.shape) for tray in trays]
            self._turns.append((both[rank], both[1 - rank]))

    def run(self, x: Array, result: Array) -> None:
        """Make ``result`` the sum or mean of both ranks' ``x``."""
        table = self._table
        mine, theirs = self._turns[table.turn & 1]
        if self._divides_first:
            x = _divide(x, self._world)
        mine[...] = x
        self._comm.bytes_sent += self._nbytes
        table.meet()
        if self._is_one_entry:  # which NumPy takes four times as long to add in place
            x = mine
        total = result if self._count is None else self._sum
        if self._is_first:
            _add(x, theirs, total)
        else:  # in the same order on both: of two NaNs the first survives
            _add(theirs, x, total)
        if self._count is not None:
            _divide(total, self._count, result)


class TwoShot(Plan):
    """Larger arrays: rank r adds up chunk r for all.

    Private arrays: every rank writes on its slate what the others are to add up, and finds there
    in the end what they have made of it; what does not fit on a slate goes in pieces.  Symmetric
    arrays need no slate (see Push), if all ranks have the same part of one as their result: they
    tell each other when they first meet.
    """

    def _prepare(self, like: Array) -> None:
        rank, world = self._comm.rank, self._world
        bounds = chunk_bounds(like.size, world)
        self._start, stop = bounds[rank]
        own = (stop - self._start) * like.itemsize
        self._terms, self._sums = like.nbytes - own, (world - 1) * own  # bytes for others
        step = TRAY // like.itemsize // world
        self._pieces = [
            self._piece([(a + at, min(a + at + step, b)) for a, b in bounds], step, like.dtype)
            for at in range(0, bounds[0][1], step)  # the first chunk is the longest
        ]
        self.is_one_piece = len(self._pieces) == 1

    def _piece(self, bounds: list[tuple[int, int]], step: int, dtype: np.dtype[Any]) -> _Piece:
        rank, peers, slates = self._comm.rank, self._table.peers, self._table.slates(dtype)
        places = [
            slice(j * step, j * step + max(0, stop - start))
            for j, (start, stop) in enumerate(bounds)
        ]
        return _Piece(
            [(slice(*bounds[peer]), slates[rank][places[peer]]) for peer in peers],
            slice(*bounds[rank]),
            [slates[peer][places[rank]] for peer in peers],
            slates[rank][places[rank]],
        )

    def run(self, x: Array, result: Array) -> None:
        """Make ``result`` the sum or mean of all ranks' ``x``."""
        part = self._arrays.part(result)
        if part is None:
            if self._divides_first:
                x = _divide(x, self._world)
            self._by_slates(x, result)
            return
        if self._divides_first:
            _divide(x, self._world, result)
        elif x is not result:
            result[...] = x
        if self._table.tell(part.place) == [part.place] * self._world:
            self._push(part, result.dtype).run()
        else:
            self._by_slates(result, result)

    def scatter(self, x: Array, result: Array) -> None:
        """Make ``result`` this rank's chunk of the flat sum of all ranks' ``x``."""
        mine, start = x.reshape(-1), self._start
        for piece in self._pieces:
            chunk = piece.chunk
            self._sum_up(piece, mine, result[chunk.start - start : chunk.stop - start])
        self._comm.bytes_sent += self._terms  # nobody reads the sums

    def _by_slates(self, x: Array, result: Array) -> None:
        mine, total = x.reshape(-1), result.reshape(-1)
        for piece in self._pieces:
            self._sum_up(piece, mine, total[piece.chunk])
            for theirs, place in piece.laid:
                total[theirs] = place
        self._comm.bytes_sent += self._terms + self._sums

    def _sum_up(self, piece: _Piece, x: Array, own: Array) -> None:
        """Make ``own`` the sum of one chunk, for others, too, and see others' sums on the slate."""
        laid, chunk, others, scratch = piece
        for theirs, place in laid:
            place[...] = x[theirs]
        if any(self._table.tell(0)):
            self._table.tell(0)  # with those who hoped for a push, and lay theirs out now
        _add_up(others, x[chunk], scratch, own)
        if self._count is not None:
            _divide(own, self._count, own)
        for place in others:
            place[...] = own
        self._table.meet()

    def _push(self, part: Part, dtype: np.dtype[Any]) -> Push:
        key = dtype, self._count is not None
        push = part.plans.get(key)
        if push is None:
            rows = [row.view(dtype) for row in part.rows]
            push = part.plans[key] = Push(self._comm, self._table, rows, self._count)
        return push


class _Piece(NamedTuple):
    """What of an array goes over the slates at once."""

    laid: list[tuple[slice, Array]]  # the other ranks' chunks in the array and on the slate
    chunk: slice  # this rank's in the array
    others: list[Array]  # and on the others' slates, in the ring's order
    scratch: Array  # as large


class Push:
    """Symmetric arrays: rank r adds up chunk r where all ranks' arrays lie, and stores it there."""

    def __init__(self, comm: Comm, table: Table, rows: list[Array], count: Array | None) -> None:
        """``rows`` are all ranks' arrays, flat; ``count`` is what the sum is divided by."""
        rank, world = comm.rank, comm.world
        start, stop = chunk_bounds(rows[0].size, world)[rank]
        step = BLOCK // rows[0].itemsize
        scratch = np.empty(min(step, stop - start), rows[0].dtype)
        self._comm, self._table, self._count = comm, table, count
        self._nbytes = (world - 1) * (stop - start) * rows[0].itemsize
        self._blocks = []
        for at in range(start, stop, step):
            block = slice(at, min(at + step, stop))
            *others, own = [rows[(rank + 1 + k) % world][block] for k in range(world)]
            self._blocks.append((others, own, scratch[: own.size]))

    def run(self) -> None:
        """Add up; all ranks have brought their terms before it, and have the sum after it."""
        for others, own, scratch in self._blocks:
            _add_up(others, own, scratch, own)
            if self._count is not None:
                _divide(own, self._count, own)
            for place in others:
                place[...] = own
        self._comm.bytes_sent += self._nbytes
        self._table.meet()


def _add_up(others: list[Array], own: Array, scratch: Array, total: Array) -> None:
    """``total`` becomes the sum of ``others``, one after the other, and then of ``own``."""
    term = others[0]
    for other in others[1:]:
        term = _add(term, other, scratch)
    _add(term, own, total)
