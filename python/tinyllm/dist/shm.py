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

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tinyllm.dist import arrays, preflight
from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm, pipe_mesh
from tinyllm.dist.port import Ends, Port
from tinyllm.dist.segment import Segment, Table, mapped, reserved_file

SMALL = 16 << 10  # bytes up to which every rank adds up everything
BLOCK = 256 << 10  # bytes that push adds at a time: they stay in the cache for the stores
_PAGE = 4096
_PLANS = 256  # kinds of small arrays that are remembered


class ShmComm(Comm):
    """A Comm whose collectives go through shared memory."""

    def __init__(self, segment: Segment, port: Port) -> None:
        super().__init__(port)
        self._table = Table(segment, port)
        self._others = [(self.rank + step) % self.world for step in range(1, self.world)]
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._shared: dict[int, _Shared] = {}  # symmetric arrays, by id, as long as they live
        self._made = 0  # how many there ever were: the same on all ranks

    # -- small arrays ----------------------------------------------------------------------------

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: Array | None = None) -> Array:
        """Return the sum or mean of all ranks' ``x``; see Comm.all_reduce.

        The least traffic takes an array of ``comm.empty`` that is both ``x`` and ``out``.
        """
        x = arrays.reducible(x, "all_reduce", op)
        if x.nbytes <= SMALL:
            return self._one_shot(x, op, out)
        if not self._made:
            return super().all_reduce(x, op, out=out)
        return super().all_reduce(x, op, out=out)

    def _one_shot(self, x: Array, op: str, out: Array | None) -> Array:
        result = arrays.result("all_reduce", x.shape, x.dtype, out)
        plan = self._plan(x, op)
        with self._port.operation("all_reduce", x, redop=op):
            plan.lay(x, self._table.turn)
            self.bytes_sent += x.nbytes
            self._table.meet()
            plan.add_up(self._table.turn - 1, result)
        return arrays.delivered(result, out)

    def _plan(self, x: Array, op: str) -> _Plan:
        key = (x.shape, x.dtype, op)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            plan = self._plans[key] = _Plan(self._table, x, op, self._chunks)
        return plan

    # -- the ring's halves -----------------------------------------------------------------------

    def _reduce_ring(self, mine: list[Array], total: list[Array]) -> None:
        own, dtype = self.rank, mine[0].dtype
        longest = max(1, mine[0].size)
        scratch, step = None, 0
        start = 0
        while start < longest:
            trays = self._table.trays(dtype, self._table.turn)
            step = trays[own].size // self.world
            for chunk in self._others:
                part = mine[chunk][start : start + step]
                trays[own][chunk * step : chunk * step + part.size] = part
                self.bytes_sent += part.nbytes
            self._table.meet()
            part = mine[own][start : start + step]
            here = slice(own * step, own * step + part.size)
            terms = [trays[peer][here] for peer in self._others]
            scratch = trays[own][here]  # nobody reads it: the chunk is this rank's own
            _add_up([*terms, part], scratch, total[own][start : start + step])
            start += step

    def _gather_ring(self, chunks: list[Any]) -> None:
        mine = chunks[self.rank]
        start, longest = 0, 1
        while start < longest:
            turn = self._table.turn
            trays = self._table.trays(mine.dtype, turn)
            step = trays[self.rank].size
            part = mine[start : start + step]
            trays[self.rank][: part.size] = part
            self.bytes_sent += part.nbytes
            self._table.meet()
            for peer in self._others:
                if chunks[peer] is None:
                    size = prod(self._table.frame_of(peer, turn).shape)
                    chunks[peer] = np.empty(size, mine.dtype)
                part = chunks[peer][start : start + step]
                part[:] = trays[peer][: part.size]
            longest = max(chunk.size for chunk in chunks)
            start += step

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        with self._port.operation("barrier"):
            self._table.meet()

    def broadcast(self, x: ArrayLike | None, src: int, *, out: Array | None = None) -> Array:
        """Return rank ``src``'s ``x``; see Comm.broadcast.  ``src`` writes x.nbytes bytes."""
        src = preflight.rank("broadcast: src", src, self.rank, self.world)
        known: Any = x
        if x is not None or self.rank == src:
            known = arrays.numeric(known, "broadcast")
        with self._port.operation("broadcast", known, root=src):
            result = self._spread(known, src, partial(arrays.result, "broadcast", out=out))
        return arrays.delivered(result, out)

    def _spread(self, x: Any, src: int, room: Any) -> Array:
        result: Any = None
        if self.rank == src:
            result = room(x.shape, x.dtype)
            np.copyto(result, x)
        start, size = 0, 1
        while start < size:
            turn = self._table.turn
            if self.rank == src:
                flat = result.reshape(-1)
                tray = self._table.trays(result.dtype, turn)[src]
                part = flat[start : start + tray.size]
                tray[: part.size] = part
                self.bytes_sent += part.nbytes
            self._table.meet()
            if result is None:
                theirs = self._table.frame_of(src, turn)
                result = room(theirs.shape, theirs.dtype)
            tray = self._table.trays(result.dtype, turn)[src]
            if self.rank != src:
                part = result.reshape(-1)[start : start + tray.size]
                part[:] = tray[: part.size]
            start, size = start + tray.size, result.size
        return result


class _Plan:
    """A small all_reduce with everything at hand."""

    def __init__(self, table: Table, x: Array, op: str, chunks: Any) -> None:
        world = table.world
        self._total = np.empty_like(x)
        totals = chunks(self._total)
        rows = [[tray[: x.size] for tray in table.trays(x.dtype, parity)] for parity in (0, 1)]
        self._mine = [row[table.rank].reshape(x.shape) for row in rows]
        parts = [[chunks(row) for row in by_rank] for by_rank in rows]
        self._sums = [
            [
                (*(by_rank[(j + 1 + s) % world][j] for s in range(world)), totals[j])
                for j in range(world)
                if totals[j].size
            ]
            for by_rank in parts
        ]
        self._world = world
        self._mean = op == "mean"
        self._halves = self._mean and x.dtype == np.float16

    def lay(self, x: Array, turn: int) -> None:
        if self._halves:
            np.divide(x, self._world, out=self._mine[turn & 1])
        else:
            self._mine[turn & 1][...] = x

    def add_up(self, turn: int, result: Array) -> None:
        add = np.add
        for first, second, *rest, total in self._sums[turn & 1]:
            add(first, second, total)
            for part in rest:
                add(total, part, total)
        if self._mean and not self._halves:
            np.divide(self._total, self._world, out=self._total)
        result[...] = self._total


def _add_up(terms: Sequence[Array], scratch: Array, total: Array) -> None:
    """``total`` becomes the sum of ``terms``, of which the last may be ``total`` itself."""
    first, *middle, last = terms
    for term in middle:
        first = np.add(first, term, out=scratch)
    np.add(first, last, out=total)


class _Shared(NamedTuple):
    number: int
    address: int
    rows: list[Array]
    array: weakref.ref[Array]


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
    except OSError:
        for end in pipes:
            end.close()
        raise
    copies = [segment.copy() for _ in pipes]
    segment.close()
    return [
        ShmEnds(end.rank, end.channels, partial(ShmComm, copy), copy)
        for end, copy in zip(pipes, copies, strict=True)
    ]
