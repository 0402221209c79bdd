"""shm_mesh: the same Comm over shared memory, for ranks on one machine.

    spawn(fn, 4, mesh=shm_mesh)

send and recv, and everything that happens to ranks, go through the pipes; the arrays of collectives
go through a segment that all ranks map (segment.py).  Chunk j is added up in the ring's order, rank
j + 1 first and rank j last, so that the bits are those of the other meshes.  There are three ways:

    one-shot    small arrays: every rank lays its own out, all add all of them up; they meet once
    two-shot    the ring's two halves, without the ring: lay out what others need, meet, add up
                one's own chunk; lay that out, meet, copy the others'
    push        arrays that all ranks share (``comm.empty``): rank r adds up chunk r from all ranks'
                arrays and stores the sum into all of them; they meet before and after

``bytes_sent`` counts what a rank writes for others: one-shot n; two-shot n, that is n less its own
chunk and then that; push (p - 1) times its own chunk.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tinyllm.dist import arrays, frame, preflight
from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh
from tinyllm.dist.port import Call, Ends, Port
from tinyllm.dist.segment import TRAY, Segment, Table, mapped, reserved_file

SMALL = 16 << 10  # bytes up to which every rank adds up everything
BLOCK = 256 << 10  # bytes that push adds at a time: they stay in the cache for the stores
_PLANS = 256  # kinds of small arrays that are remembered


class ShmComm(Comm):
    """A Comm whose collectives go through shared memory."""

    def __init__(self, segment: Segment, port: Port) -> None:
        super().__init__(port)
        self._table = Table(segment, port)
        self._others = [(self.rank + step) % self.world for step in range(1, self.world)]
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._symmetric: dict[int, tuple[_Symmetric, Any]] = {}  # by the array's id
        self._made = 0  # how many there ever were: the same on all ranks

    # -- all-reduce ------------------------------------------------------------------------------

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: Array | None = None) -> Array:
        """Return the sum or mean of all ranks' ``x``, in x's shape and dtype; see Comm.all_reduce.

        Least is copied where ``x`` is an array of ``comm.empty``, or part of one, and ``out``, too.
        """
        if type(x) is type(out) is np.ndarray and type(op) is str:  # the fast way, if it was seen
            plan = self._plans.get((x.shape, x.dtype, op))
            if plan is not None and plan.fits(out):
                self._one_shot(plan, x, out)
                return out
        x = arrays.reducible(x, "all_reduce", op)
        result = arrays.result("all_reduce", x.shape, x.dtype, out)
        x = arrays.apart(x, result)
        if x.nbytes <= SMALL:
            self._one_shot(self._plan(x, op), x, result)
            return arrays.delivered(result, out)
        with self._port.operation("all_reduce", x, redop=op):
            count = self.world if op == "mean" else 1
            if count > 1 and x.dtype == np.float16:  # whose sum may well be infinite
                x, count = np.divide(x, count, out=result), 1
            rows = self._everyones(result, x) if self._made else None
            if rows:
                self._push(rows, count)
            else:
                self._two_shot(x, result, count)
        return arrays.delivered(result, out)

    def _one_shot(self, plan: _Plan, x: Array, result: Array) -> None:
        with self._port.begin(plan.call):
            turn = self._table.turn
            plan.lay(x, turn)
            self.bytes_sent += plan.nbytes
            self._table.meet()
            result[...] = plan.total(turn)

    def _plan(self, x: Array, op: str) -> _Plan:
        key = (x.shape, x.dtype, op)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            trays = [self._table.trays(x.dtype, turn) for turn in (0, 1)]
            call = self._port.known("all_reduce", x, op)
            plan = self._plans[key] = _Plan(call, x, trays, self.rank, op == "mean")
        return plan

    def _two_shot(self, x: Array, result: Array, count: int) -> None:
        mine, total = self._chunks(x), self._chunks(result)
        step = self._step(x.dtype)
        for start in range(0, mine[0].size, step):  # the first chunk is the longest
            piece = slice(start, start + step)
            self._reduce([chunk[piece] for chunk in mine], total[self.rank][piece])
            if count > 1:
                total[self.rank][piece] /= count
            self._gather([chunk[piece] for chunk in total])

    def _push(self, rows: list[Array], count: int) -> None:
        """Add up one's own chunk where the others' arrays are, and store it there."""
        chunks = [self._chunks(rows[peer])[self.rank] for peer in (*self._others, self.rank)]
        step = BLOCK // rows[0].itemsize
        scratch = np.empty(step, rows[0].dtype)
        for start in range(0, chunks[0].size, step):
            *others, own = [chunk[start : start + step] for chunk in chunks]
            _add_up([*others, own], scratch[: own.size], own)
            if count > 1:
                own /= count
            for other in others:
                other[:] = own
        self.bytes_sent += len(self._others) * chunks[0].nbytes
        self._table.meet()

    # -- symmetric arrays ------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = float) -> Array:
        """Return a symmetric array: it lies in memory that all ranks share, as do the others'.

        A collective: all ranks call it, with the same shape and dtype.  OSError where there is not
        that much memory for each rank.
        """
        like = arrays.numeric(np.empty(shape, dtype), "empty")
        stride = -max(1, like.nbytes) // mmap.PAGESIZE * -mmap.PAGESIZE
        size = self.world * stride
        with self._port.operation("empty", like):
            fd = reserved_file("symmetric array", size) if self.rank == 0 else -1
            try:
                self._table.meet()
                fd = self._port.hand_out(fd)
                memory = mapped(fd, size)
            finally:
                if fd >= 0:
                    os.close(fd)
        self._made += 1
        starts = range(0, size, stride)
        rows = [np.frombuffer(memory, np.uint8, stride, start) for start in starts]
        array = np.ndarray(like.shape, like.dtype, memory, starts[self.rank])
        self._remember(array, _Symmetric(self._made, _address(array), rows))
        return array

    def _remember(self, array: Array, symmetric: _Symmetric) -> None:
        """Know the array, and views of it, as long as there are any."""
        known, key = self._symmetric, id(array)
        known[key] = symmetric, weakref.ref(array, lambda _: known.pop(key))

    def _everyones(self, result: Array, x: Array) -> list[Array] | None:
        """All ranks' ``result``, flat, if all have the same part of a symmetric array there.

        Ranks may differ in that, so they tell each other; ``x`` is in ``result`` by then.
        """
        root = result.base if type(result.base) is np.ndarray else result
        symmetric, _ = self._symmetric.get(id(root), (None, None))
        place = 0
        if symmetric:
            offset = _address(result) - symmetric.address
            place = symmetric.number * frame.MAX_BYTES + offset
            if x is not result:
                np.copyto(result, x)
        self._table.meet(place)
        if not symmetric or self._table.words() != [place] * self.world:
            return None
        there = slice(offset, offset + result.nbytes)
        return [row[there].view(result.dtype) for row in symmetric.rows]

    # -- the ring's halves -----------------------------------------------------------------------

    def _step(self, dtype: np.dtype[Any]) -> int:
        """Entries of each chunk that go in one piece: all chunks' pieces fit on a tray."""
        return TRAY // dtype.itemsize // self.world

    def _reduce_ring(self, mine: list[Array], total: list[Array]) -> None:
        step = self._step(mine[0].dtype)
        for start in range(0, max(1, mine[0].size), step):
            piece = slice(start, start + step)
            self._reduce([chunk[piece] for chunk in mine], total[self.rank][piece])

    def _reduce(self, mine: list[Array], total: Array) -> None:
        """Make ``total`` the sum of all ranks' ``mine[rank]``; all chunks fit on one tray."""
        trays = self._table.trays(total.dtype, self._table.turn)
        step = self._step(total.dtype)
        for chunk in self._others:
            trays[self.rank][chunk * step : chunk * step + mine[chunk].size] = mine[chunk]
            self.bytes_sent += mine[chunk].nbytes
        self._table.meet()
        here = slice(self.rank * step, self.rank * step + total.size)
        scratch = trays[self.rank][here]  # of the chunk that is this rank's own
        _add_up([*(trays[peer][here] for peer in self._others), mine[self.rank]], scratch, total)

    def _gather(self, chunks: list[Array]) -> None:
        """Fill ``chunks`` with those of the other ranks, each at most a tray full."""
        mine = chunks[self.rank]
        trays = self._table.trays(mine.dtype, self._table.turn)
        trays[self.rank][: mine.size] = mine
        self.bytes_sent += mine.nbytes
        self._table.meet()
        for peer in self._others:
            chunks[peer][:] = trays[peer][: chunks[peer].size]

    def _gather_ring(self, chunks: list[Any]) -> None:
        self._table.meet()  # to see how much the others bring
        dtype = chunks[self.rank].dtype
        for peer in self._others:
            chunks[peer] = np.empty(prod(self._table.frame_of(peer).shape), dtype)
        step = TRAY // dtype.itemsize
        for start in range(0, max(chunk.size for chunk in chunks), step):
            self._gather([chunk[start : start + step] for chunk in chunks])

    # -- broadcast and barrier -------------------------------------------------------------------

    def broadcast(self, x: ArrayLike | None, src: int, *, out: Array | None = None) -> Array:
        """Return rank ``src``'s ``x``; see Comm.broadcast.  ``src`` writes x.nbytes bytes."""
        src = preflight.rank("broadcast: src", src, self.rank, self.world)
        known: Any = x
        if x is not None or self.rank == src:
            known = arrays.numeric(known, "broadcast")
        with self._port.operation("broadcast", known, root=src):
            self._table.meet()  # to see what src brings
            theirs = self._table.frame_of(src)
            assert theirs.dtype is not None
            result = arrays.result("broadcast", theirs.shape, theirs.dtype, out)
            if self.rank == src:
                np.copyto(result, known)
            self._spread(result.reshape(-1), src)
        return arrays.delivered(result, out)

    def _spread(self, flat: Array, src: int) -> None:
        """Copy ``flat`` from rank ``src`` to all others."""
        step = TRAY // flat.itemsize
        for start in range(0, flat.size, step):
            piece = flat[start : start + step]
            tray = self._table.trays(flat.dtype, self._table.turn)[src][: piece.size]
            if self.rank == src:
                tray[:] = piece
                self.bytes_sent += piece.nbytes
            self._table.meet()
            if self.rank != src:
                piece[:] = tray

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        with self._port.operation("barrier"):
            self._table.meet()


class _Plan:
    """All that the one-shot of one kind of array takes, worked out when it is first seen."""

    def __init__(
        self, call: Call, like: Array, trays: list[list[Array]], rank: int, mean: bool
    ) -> None:
        world = len(trays[0])
        self.call, self.nbytes = call, like.nbytes
        self._total = np.empty_like(like)
        self._mine = [by_rank[rank][: like.size].reshape(like.shape) for by_rank in trays]
        self._sums = [self._in_ring_order(by_rank) for by_rank in trays]
        early = like.dtype == np.float16  # whose sum may well be infinite
        self._divide_first = world if mean and early else 1
        self._divide_last = world if mean and not early else 1

    def _in_ring_order(self, trays: list[Array]) -> list[tuple[Array, Array, list[Array], Array]]:
        """For each chunk j rank j + 1's, the next rank's, those of the rest, and where they go."""
        world, total = len(trays), self._total.reshape(-1)
        sums = []
        for j, (start, stop) in enumerate(chunk_bounds(total.size, world)):
            if start < stop:
                ring = [trays[(j + 1 + step) % world][start:stop] for step in range(world)]
                sums.append((ring[0], ring[1], ring[2:], total[start:stop]))
        return sums

    def fits(self, out: Array) -> bool:
        """Whether the result can be written into ``out``."""
        total = self._total
        return out.shape == total.shape and out.dtype is total.dtype and out.flags.writeable

    def lay(self, x: Array, turn: int) -> None:
        """Lay ``x`` out for the others."""
        if self._divide_first > 1:
            np.divide(x, self._divide_first, out=self._mine[turn & 1])
        else:
            self._mine[turn & 1][...] = x

    def total(self, turn: int) -> Array:
        """The result, until the plan is used again."""
        add = np.add
        for first, second, rest, total in self._sums[turn & 1]:
            add(first, second, total)
            for part in rest:
                add(total, part, total)
        if self._divide_last > 1:
            self._total /= self._divide_last
        return self._total


def _add_up(terms: Sequence[Array], scratch: Array, total: Array) -> None:
    """``total`` becomes the sum of ``terms``, of which the last may be ``total`` itself."""
    first, *middle, last = terms
    for term in middle:
        first = np.add(first, term, out=scratch)
    np.add(first, last, out=total)


class _Symmetric(NamedTuple):
    """Where all ranks' parts of a symmetric array lie."""

    number: int  # the same on all ranks
    address: int  # of this rank's
    rows: list[Array]  # all ranks', as bytes


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass
class ShmEnds(Ends):
    """Ends with the segment beside the pipes."""

    segment: Segment

    def close(self) -> None:
        """In the parent: let go of the pipes and of the memory."""
        super().close()
        self.segment.close()


def shm_mesh(world: int) -> list[Ends]:
    """Pipes, and a segment of shared memory; a world of one has nobody to share it with."""
    pipes = pipe_mesh(world)
    if world == 1:
        return pipes
    try:
        segment = Segment(world)
        copies = [segment.copy() for _ in pipes]
    except OSError:
        for end in pipes:
            end.close()
        raise
    return [
        ShmEnds(end.rank, end.channels, partial(ShmComm, copy), copy)
        for end, copy in zip(pipes, copies, strict=True)
    ]
