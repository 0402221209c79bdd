"""What the tests of tinyllm.dist share: worlds in threads, data, the ring's sum in plain NumPy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from tinyllm.dist import PeerLost, nonblocking
from tinyllm.dist.board import RUNNING, Board
from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh
from tinyllm.dist.shm import ShmComm, shm_mesh
from tinyllm.dist.tcp import tcp_mesh

MESHES = {"pipe": pipe_mesh, "tcp": tcp_mesh, "shm": shm_mesh}
OTHERS = [mesh for mesh in MESHES if mesh != "pipe"]
WORLDS = (1, 2, 3, 4, 5, 8)
DTYPES = [*"?bhilBHILefdgFDG"]  # NumPy's letters for its number types


def in_threads(world: int, fn, *args, mesh=pipe_mesh) -> list[Any]:
    """``fn(comm, *args)`` in a thread per rank: real links in one process, for many small cases."""
    board = Board(world)
    comms: list[Comm] = []

    def rank(end) -> Any:
        comm = end.open(board)  # which may wait until all others open theirs
        comms.append(comm)
        board.slot(comm.rank).mark(RUNNING)  # as a rank's process does
        try:
            value = fn(comm, *args)
            finish(comm)
            return value
        except BaseException:
            hang_up(comm)  # so that the others do not wait for it
            with suppress(BaseException):
                finish(comm)
            raise

    try:
        with ThreadPoolExecutor(world) as pool:
            futures = [pool.submit(rank, end) for end in mesh(world)]
        errors = [future.exception() for future in futures if future.exception()]
        if errors:  # a lost peer is a consequence
            raise min(errors, key=lambda error: isinstance(error, PeerLost))
        return [future.result() for future in futures]
    finally:
        for comm in comms:
            hang_up(comm)
        board.close()


def finish(comm: Comm) -> None:
    """What a rank's process does when its function has returned."""
    if comm._port.queue is not None:
        nonblocking.finish(comm)


def hang_up(comm: Comm) -> None:
    for link in comm._port._links:
        if link is not None:
            link.close()


def data(rank: int, shape, dtype="f8") -> np.ndarray:
    """Another array on every rank, another value at every index, and sums that depend on order."""
    dtype = np.dtype(dtype)
    n = int(np.prod(shape))
    index = np.arange(n)
    if dtype.kind == "b":
        return ((index * 7 + rank * 3) % 5 < 2).reshape(shape)
    if dtype.kind in "iu":
        return ((index * 37 + rank * 101) % 120).astype(dtype).reshape(shape)
    x = np.sin(index * 1.7 + rank * 0.61) * 10.0 ** (index % 5 - 2)
    if dtype.kind == "c":
        x = x + 1j * np.cos(index * 0.9 - rank)
    return x.astype(dtype).reshape(shape)


def ring_sum(parts: list[np.ndarray]) -> np.ndarray:
    """The sum as the chapter defines it: chunk j is added up from rank j + 1 on, in ring order."""
    world = len(parts)
    flats = [part.reshape(-1) for part in parts]
    total = np.empty_like(flats[0])
    for j, (start, stop) in enumerate(chunk_bounds(flats[0].size, world)):
        chunk = flats[(j + 1) % world][start:stop]
        for step in range(2, world + 1):
            chunk = chunk + flats[(j + step) % world][start:stop]
        total[start:stop] = chunk
    return total.reshape(parts[0].shape)


def ring_bytes(world: int, rank: int, n: int, itemsize: int) -> tuple[int, int]:
    """Bytes that ``rank`` sends in the reduce-scatter and in the all-gather of n entries."""
    sizes = [stop - start for start, stop in chunk_bounds(n, world)]
    reduce_scatter = sum(sizes) - sizes[rank]  # every chunk but its own
    all_gather = sum(sizes) - sizes[(rank + 1) % world]  # every chunk but its right neighbour's
    return reduce_scatter * itemsize, all_gather * itemsize


def bytes_of(comm: Comm, op: str, n: int, itemsize: int = 8, src: int = 0) -> int:
    """Bytes that this rank sends in a collective on n entries (all_gather: n in all)."""
    reduce_scatter, all_gather = ring_bytes(comm.world, comm.rank, n, itemsize)
    if isinstance(comm, ShmComm):  # what it writes for others, once for all who read it
        return {
            "all_reduce": shared_bytes(comm, n, itemsize),
            "reduce_scatter": reduce_scatter,
            "all_gather": n * itemsize - reduce_scatter,
            "broadcast": n * itemsize * (comm.rank == src),
        }[op]
    return {
        "all_reduce": reduce_scatter + all_gather,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": n * itemsize * ((comm.rank + 1) % comm.world != src),
    }[op]


def shared_bytes(comm: ShmComm, n: int, itemsize: int) -> int:
    """What a rank writes for others in shared memory: all of a small array, or the others' chunks
    of its own and the sum of its chunk for each of them."""
    if n * itemsize <= comm._small:
        return n * itemsize
    start, stop = chunk_bounds(n, comm.world)[comm.rank]
    return (n + (comm.world - 2) * (stop - start)) * itemsize


def same_bits(comm: Comm, x: np.ndarray) -> bool:
    """Whether all ranks hold the same bytes."""
    mine = np.frombuffer(x.tobytes(), np.uint8)
    everyone = comm.all_gather(mine).reshape(comm.world, -1)
    return bool((everyone == mine).all())
