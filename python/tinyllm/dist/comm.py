"""Collectives over processes: chapter L11.2 in code.

``spawn(fn, p)`` starts p processes and joins each pair of them by a pipe.  In each process a
``Comm`` knows its own number, the *rank*, and the number of all, the *world*.  Processes share no
objects: every byte moves through a pipe, and ``bytes_sent`` counts it.

An all-reduce gives every rank the sum of all ranks' arrays.  On a ring it is two walks of p - 1
steps, each step moving one chunk of n/p entries to the right:

    reduce-scatter   every rank adds its part to what passes; rank r ends with chunk r summed
    all-gather       the finished chunks walk on until everyone has them all

so that each rank sends 2 (p - 1)/p · n entries, the least that is possible (Patarasuk, Yuan 2009).

Beside it stand: how messages travel (port), what arrays may be (arrays), how ranks live (launch).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import combinations, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tinyllm.dist import arrays, launch, preflight
from tinyllm.dist.arrays import Array
from tinyllm.dist.child import Endpoint
from tinyllm.dist.port import Ends, Port

T = TypeVar("T")


def chunk_bounds(n: int, world: int) -> list[tuple[int, int]]:
    """Where each rank's chunk of ``n`` entries begins and ends: ``[(start, stop), ...]``.

    The sizes are numpy.array_split's: the first ``n % world`` chunks are one entry larger.
    ValueError for n < 0 or world < 1, TypeError for what is no integer.
    """
    n = preflight.whole_number("chunk_bounds: n", n, at_least=0)
    world = preflight.whole_number("chunk_bounds: world", world, at_least=1)
    size, larger = divmod(n, world)
    edges = [rank * size + min(rank, larger) for rank in range(world + 1)]
    return list(pairwise(edges))


_bounds = lru_cache(maxsize=256)(chunk_bounds)  # training repeats a few sizes


class Comm:
    """One rank's place in the world; every collective is called by all ranks, in the same order.

    Results are fresh, writable arrays, or ``out=`` where given; inputs stay as they are.
    ``bytes_sent`` counts the payload bytes that this rank sent.
    """

    def __init__(self, port: Port) -> None:
        self.rank = port.rank
        self.world = port.world
        self.bytes_sent = 0
        self.timeout: float | None = None  # seconds that one operation may wait for a peer
        self._port, port.limit = port, lambda: self.timeout
        self._left, self._right = (self.rank - 1) % self.world, (self.rank + 1) % self.world

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = float) -> Array:
        """Return a fresh array; over shared memory one that all_reduce can use where it lies."""
        return np.empty(shape, dtype)

    # -- between two ranks -----------------------------------------------------------------------

    def send(self, x: ArrayLike, dst: int) -> None:
        """Send a copy of ``x`` (any number dtype and shape) to rank ``dst``: x.nbytes bytes.

        What a pipe cannot hold (some 500 KB on Linux) waits until ``dst`` receives.
        """
        dst = preflight.peer("send: dst", dst, self.rank, self.world)
        x = arrays.numeric(x, "send")
        with self._port.operation("send", x, root=dst):
            self._send(dst, x)

    def recv(self, src: int) -> Array:
        """Wait for the next array from rank ``src``; the arrays of one sender arrive in order."""
        src = preflight.peer("recv: src", src, self.rank, self.world)
        with self._port.operation("recv", root=src):
            return self._port.receive(src)

    def _send(self, dst: int, x: Array) -> None:
        self._port.send(dst, x)
        self.bytes_sent += x.nbytes

    # -- the ring --------------------------------------------------------------------------------
    #
    #      0 ---> 1      Chunk j starts at rank j + 1.  Every rank adds its own part and passes the
    #      ^      |      partial sum to the right; after p - 1 steps the sum of chunk j is complete
    #      |      v      at rank j, which owns it.
    #      3 <--- 2
    #                    reduce-scatter, step s: rank r sends chunk r - s - 1, receives r - s - 2
    #                    all-gather,     step s: rank r sends chunk r - s,     receives r - s - 1
    #
    # Sums are taken in ring order, not in rank order: they equal numpy.sum to rounding.  But each
    # chunk is summed once and then copied, so that all ranks hold the same bits.

    def _exchange(self, outgoing: Array, into: Array | None, add: Array | None = None) -> Array:
        """One step of a ring: ``outgoing`` to the right, and what comes from the left (+ ``add``).

        If all ranks sent first, each would wait for its right neighbour to receive, as soon as a
        message outgrows the pipe.  So odd ranks receive first; rank 1 is always one of them.
        """
        if self.rank % 2 == 0:
            self._send(self._right, outgoing)
            return self._port.receive(self._left, into, add)
        incoming = self._port.receive(self._left, into, add)
        self._send(self._right, outgoing)
        return incoming

    def _reduce_ring(self, mine: list[Array], total: list[Array]) -> None:
        """Make ``total[rank]`` the sum of all ranks' ``mine[rank]``; the rest of it is scratch."""
        for step in range(self.world - 1):
            send_chunk = (self.rank - step - 1) % self.world
            recv_chunk = (self.rank - step - 2) % self.world
            outgoing = total[send_chunk] if step else mine[send_chunk]
            self._exchange(outgoing, total[recv_chunk], add=mine[recv_chunk])
        if self.world == 1:
            total[0][:] = mine[0]

    def _gather_ring(self, chunks: list[Array]) -> None:
        """Fill ``chunks`` with those of the other ranks; this rank's own is there."""
        for step in range(self.world - 1):
            send_chunk = (self.rank - step) % self.world
            recv_chunk = (self.rank - step - 1) % self.world
            chunks[recv_chunk] = self._exchange(chunks[send_chunk], chunks[recv_chunk])

    # -- collectives -----------------------------------------------------------------------------

    def reduce_scatter(self, x: ArrayLike, *, out: Array | None = None) -> Array:
        """Return chunk ``rank`` of the flat sum of all ranks' ``x``, 1-d.

        p - 1 steps; sends all of x but one chunk, about (p - 1)/p · x.nbytes bytes.
        """
        x = arrays.reducible(x, "reduce_scatter")
        total = self._chunks(np.empty_like(x))
        result = arrays.result("reduce_scatter", total[self.rank].shape, x.dtype, out)
        mine, total[self.rank] = self._chunks(arrays.apart(x, result)), result
        with self._port.operation("reduce_scatter", x, redop="sum"):
            self._reduce_ring(mine, total)
        return arrays.delivered(result, out)

    def all_gather(self, x: ArrayLike, *, out: Array | None = None) -> Array:
        """Return all ranks' ``x``, each flat, one after the other in rank order, 1-d.

        Their sizes may differ.  p - 1 steps; sends every rank's chunk but the right neighbour's.
        """
        x = arrays.numeric(x, "all_gather")
        chunks: list[Any] = [None] * self.world
        chunks[self.rank] = arrays.apart(x, out).reshape(-1)
        with self._port.operation("all_gather", x):
            self._gather_ring(chunks)
        result = arrays.result("all_gather", (sum(c.size for c in chunks),), x.dtype, out)
        return arrays.delivered(np.concatenate(chunks, out=result), out)

    def all_reduce(self, x: ArrayLike, op: str = "sum", *, out: Array | None = None) -> Array:
        """Return the sum or mean of all ranks' ``x``, in x's shape and dtype.

        A reduce-scatter and an all-gather: 2 (p - 1) steps, 2 (p - 1)/p · x.nbytes bytes sent.
        ``out`` may be ``x`` itself.  "mean" is for floats: TypeError for integers.
        """
        x = arrays.reducible(x, "all_reduce", op)
        result = arrays.result("all_reduce", x.shape, x.dtype, out)
        x = arrays.apart(x, result)
        with self._port.operation("all_reduce", x, redop=op):
            if halves := op == "mean" and x.dtype == np.float16:  # whose sum may well be infinite
                x = np.divide(x, self.world, out=result)
            total = self._chunks(result)
            self._reduce_ring(self._chunks(x), total)
            if op == "mean" and not halves:
                total[self.rank] /= self.world
            self._gather_ring(total)
        return arrays.delivered(result, out)

    def broadcast(self, x: ArrayLike | None, src: int, *, out: Array | None = None) -> Array:
        """Return rank ``src``'s ``x``; others pass None, or an array of the same shape and dtype.

        It walks the ring to the rank before ``src``: p - 1 steps; all but the last send x.nbytes.
        """
        src = preflight.rank("broadcast: src", src, self.rank, self.world)
        known: Any = x  # None: this rank learns shape and dtype from the message
        if x is not None or self.rank == src:
            known = arrays.numeric(known, "broadcast")
        room = partial(arrays.result, "broadcast", out=out)
        with self._port.operation("broadcast", known, root=src):
            if self.rank == src:
                result = room(known.shape, known.dtype)
                np.copyto(result, known)
            else:
                result = self._port.receive(self._left, room=room)
            if self._right != src:  # src would not read it, and the next call would stumble on it
                self._send(self._right, result)
        return arrays.delivered(result, out)

    def barrier(self) -> None:
        """Return when all ranks have called it.

        p - 1 exchanges of nothing: after step s, word has come from the s + 1 ranks to the left.
        """
        nothing = np.empty(0, np.uint8)
        with self._port.operation("barrier"):
            for _ in range(self.world - 1):
                self._exchange(nothing, nothing)

    def _chunks(self, x: Array) -> list[Array]:
        flat = x.reshape(-1)
        return [flat[start:stop] for start, stop in _bounds(flat.size, self.world)]


def pipe_mesh(world: int) -> list[Ends]:
    """A duplex pipe between each pair of ranks: for each rank, what its process opens as a Comm."""
    preflight.check_descriptors(world)
    pipes: list[list[Any]] = [[None] * world for _ in range(world)]
    for a, b in combinations(range(world), 2):
        pipes[a][b], pipes[b][a] = multiprocessing.Pipe(duplex=True)
    return [Ends(rank, pipes[rank], Comm) for rank in range(world)]


def spawn(
    fn: Callable[..., T],
    world: int,
    *args: Any,
    timeout: float | None = 60.0,
    mesh: Callable[[int], Sequence[Endpoint]] = pipe_mesh,
    method: str = "spawn",
) -> list[T]:
    """Run ``fn(comm, *args)`` in ``world`` new processes; return their results by rank.

    ``fn`` must be importable by name: each process is a fresh interpreter (with "forkserver", a
    fork of a clean one).  The first rank that raises ends the run: RankError with its traceback.
    RankDied for one that ended without returning; CommTimeout, a TimeoutError, after ``timeout``
    seconds (None: no limit).  A rank has cores // world BLAS threads, or as the environment says.
    """
    job = preflight.checked_job(fn, world, args, timeout, method)
    results: list[Any] = [None] * job.world
    with launch.Team(job, mesh(job.world)) as team:
        for _ in range(job.world):
            report = team.wait_any()
            if report.failed:
                raise team.error(report)
            results[report.rank] = report.value
    return results
