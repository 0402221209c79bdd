"""shm_mesh: the same Comm over shared memory, for ranks on one machine.

    spawn(fn, 4, mesh=shm_mesh)

send and recv, and everything that happens to ranks, go through the pipes; the arrays of collectives
go through a segment that all ranks map (segment.py).  Chunk j is added up in the ring's order, rank
j + 1 first and rank j last, so that the bits are those of the other meshes, but for the question
which of two NaNs survives an addition.  There are three ways (plans.py):

    one-shot    small arrays: every rank lays its own out, all add all of them up; they meet once
    two-shot    the ring's two halves, without the ring: write down what others need, meet, add up
                one's own chunk; write the sum over its terms, meet, copy the others'
    push        arrays that all ranks share (``comm.empty``): rank r adds up chunk r from all ranks'
                arrays and stores the sum into all of them; they meet before and after

``bytes_sent`` counts what a rank writes for others: one-shot n; two-shot n less its own chunk, and
then p - 1 times that chunk; push only the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy import ndarray
from numpy.typing import ArrayLike, DTypeLike

from tinyllm.dist import arrays, preflight
from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh
from tinyllm.dist.launch import cores
from tinyllm.dist.plans import OneShot, OneShotOfTwo, Plan, TwoShot
from tinyllm.dist.port import Ends, Port
from tinyllm.dist.segment import TRAY, Segment, Table
from tinyllm.dist.symmetric import SymmetricArrays

AnyPlan = TypeVar("AnyPlan", bound=Plan)

ONE_SHOT = 8 << 10  # bytes up to which every rank adds up everything
CROWDED = 16 << 10  # the same with more ranks than cores, where meeting takes longest
_PLANS = 256  # kinds of arrays that are remembered


class ShmComm(Comm):
    """A Comm whose collectives go through shared memory."""

    def __init__(self, segment: Segment, port: Port) -> None:
        super().__init__(port)
        self._table = Table(segment, port)
        self._small = CROWDED if segment.crowded else ONE_SHOT
        self._arrays = SymmetricArrays(self._table, port)
        one_shot = OneShotOfTwo if self.world == 2 else OneShot
        self._one_shot = lru_cache(_PLANS)(partial(self._plan, one_shot))
        self._two_shot = lru_cache(_PLANS)(partial(self._plan, TwoShot))
        self._at_hand: dict[tuple[Any, ...], Plan] = {}  # by the kinds of x, op and out

    # -- all-reduce ------------------------------------------------------------------------------

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: Array | None = None) -> Array:
        """Return the sum or mean of all ranks' ``x``, in x's shape and dtype; see Comm.all_reduce.

        Least is copied where ``x`` is an array of ``comm.empty``, or part of one, and ``out``, too.
        """
        if type(x) is type(out) is ndarray and out.flags.carray:
            try:
                plan = self._at_hand[x.shape, x.dtype, op, out.shape, out.dtype]
            except (KeyError, TypeError):  # not seen before, or no op
                pass
            else:
                port = self._port
                port.begin(plan.call)
                try:  # in place of a with block, which takes longer
                    plan.run(x, out)
                    port.end()
                except BaseException as error:
                    port.failed(error)
                    raise
                return out
        x = arrays.reducible(x, "all_reduce", op)
        result = arrays.result("all_reduce", x.shape, x.dtype, out)
        x = arrays.apart(x, result)
        with self._port.operation("all_reduce", x, redop=op):
            way = self._one_shot if x.nbytes <= self._small else self._two_shot
            plan = way(x.shape, x.dtype, op)
            self._keep_at_hand(plan, x, op)
            plan.run(x, result)
        return arrays.delivered(result, out)

    def _plan(
        self, way: type[AnyPlan], shape: tuple[int, ...], dtype: np.dtype[Any], op: str
    ) -> AnyPlan:
        return way(self, self._table, self._arrays, np.empty(shape, dtype), op)

    def _keep_at_hand(self, plan: Plan, x: Array, op: str) -> None:
        """From now on arrays of this kind go the fast way, where they may overlap in any way."""
        if plan.is_one_piece:
            if len(self._at_hand) == _PLANS:
                self._at_hand.clear()
            self._at_hand[x.shape, x.dtype, op, x.shape, x.dtype] = plan

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = float) -> Array:
        """Return a symmetric array: it lies in memory that all ranks share, as do the others'.

        A collective: all ranks call it, with the same shape and dtype.  OSError where there is not
        that much memory for each rank.
        """
        like = arrays.numeric(np.empty(shape, dtype), "empty")
        with self._port.operation("empty", like):
            return self._arrays.make(like)

    # -- the other collectives -------------------------------------------------------------------

    def reduce_scatter(self, x: ArrayLike, *, out: Array | None = None) -> Array:
        """Return chunk ``rank`` of the flat sum of all ranks' ``x``; see Comm.reduce_scatter."""
        x = arrays.reducible(x, "reduce_scatter")
        start, stop = chunk_bounds(x.size, self.world)[self.rank]
        result = arrays.result("reduce_scatter", (stop - start,), x.dtype, out)
        x = arrays.apart(x, result)
        with self._port.operation("reduce_scatter", x, redop="sum"):
            self._two_shot(x.shape, x.dtype, "sum").scatter(x, result)
        return arrays.delivered(result, out)

    def all_gather(self, x: ArrayLike, *, out: Array | None = None) -> Array:
        """Return all ranks' ``x``, each flat, one after the other; see Comm.all_gather."""
        x = arrays.numeric(x, "all_gather")
        mine = arrays.apart(x, out).reshape(-1)
        step, refusal = TRAY // x.itemsize, None
        with self._port.operation("all_gather", x):
            self._lay(mine[:step])
            sizes = self._table.tell(mine.size)
            try:
                result = arrays.result("all_gather", (sum(sizes),), x.dtype, out)
            except (TypeError, ValueError) as error:  # which is no reason to leave the others
                result, refusal = np.empty(sum(sizes), x.dtype), error
            edges = list(accumulate(sizes, initial=0))
            result[edges[self.rank] : edges[self.rank + 1]] = mine
            for at in range(0, max(sizes), step):
                if at:
                    self._lay(mine[at : at + step])
                    self._table.meet()
                for peer in self._table.peers:
                    self._take(result[edges[peer] + at : edges[peer + 1]][:step], peer)
        if refusal:
            raise refusal
        return arrays.delivered(result, out)

    def broadcast(self, x: ArrayLike | None, src: int, *, out: Array | None = None) -> Array:
        """Return rank ``src``'s ``x``; see Comm.broadcast.  ``src`` writes x.nbytes bytes."""
        src = preflight.rank("broadcast: src", src, self.rank, self.world)
        known: Any = x
        if x is not None or self.rank == src:
            known = arrays.numeric(known, "broadcast")
        with self._port.operation("broadcast", known, root=src):
            if self.rank == src:
                self._lay(known.reshape(-1)[: TRAY // known.itemsize])
            self._table.show()
            self._table.meet()
            theirs = self._table.shown(src)
            assert theirs.dtype is not None
            result = arrays.result("broadcast", theirs.shape, theirs.dtype, out)
            if self.rank == src:
                np.copyto(result, known)
            self._spread(result.reshape(-1), src)
        return arrays.delivered(result, out)

    def _spread(self, flat: Array, src: int) -> None:
        """Fill ``flat`` from rank ``src``, which has laid the first piece out."""
        step = TRAY // flat.itemsize
        for at in range(0, flat.size, step):
            piece = flat[at : at + step]
            if at:
                if self.rank == src:
                    self._lay(piece)
                self._table.meet()
            if self.rank != src:
                self._take(piece, src)

    def _lay(self, x: Array) -> None:
        """Lay ``x`` out for all others."""
        self._table.tray(x.dtype)[: x.size] = x
        self.bytes_sent += x.nbytes

    def _take(self, into: Array, peer: int) -> None:
        """Copy what ``peer`` has laid out."""
        laid = self._table.laid(into.dtype)[peer][: into.size]
        into[...] = laid
        if peer == self._right:
            laid[...] = into  # the same again: peer writes there sooner next time (see segment)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        with self._port.operation("barrier"):
            self._table.meet()


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
        segment = Segment(world, crowded=world > cores())
        copies = [segment.copy() for _ in pipes]
    except OSError:
        for end in pipes:
            end.close()
        raise
    return [
        ShmEnds(end.rank, end.channels, partial(ShmComm, copy), copy)
        for end, copy in zip(pipes, copies, strict=True)
    ]
