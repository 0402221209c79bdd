"""Part 2: the bytes that an all-reduce moves, counted, for the ring and for two simpler ways.

With V bytes per rank and N ranks, each rank sends

    ring                    2 (N - 1)/N · V    no all-reduce can send less
    all-gather, then sum    (N - 1) · V        everybody gets everything and adds it up
    gather to rank 0        V                  but rank 0 sends and receives (N - 1) · V
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tinyllm.demo.check import Check
from tinyllm.dist import Comm, chunk_bounds, spawn

Vector = NDArray[np.float64]
Way = Callable[[Comm, Vector], Vector]

REPEATS = 5  # timed calls of each way
TIMEOUT = 600.0  # seconds; a vector of gigabytes takes its time


@dataclass(frozen=True)
class Measured:
    """One way to all-reduce, in numbers."""

    name: str
    sent: list[int]  # bytes, by rank
    seconds: float  # of the slowest rank; the median over the repeats


@dataclass(frozen=True)
class Traffic:
    """All ways on the same vectors."""

    world: int
    size: int
    vector_bytes: int  # V
    bound: float  # bytes that each rank has to send, at the least, on average
    ring: Measured
    all_gather: Measured
    gather: Measured
    checks: list[Check]


@dataclass(frozen=True)
class Sample:
    """What one rank has to say about one way."""

    sent: int
    seconds: list[float]
    correct: bool
    digest: str


# -- in the ranks ----------------------------------------------------------------------------------


def ring_all_reduce(comm: Comm, x: Vector) -> Vector:
    """The library's all-reduce."""
    return comm.all_reduce(x)


def all_gather_then_sum(comm: Comm, x: Vector) -> Vector:
    """Everybody gets all vectors and adds them up."""
    total: Vector = comm.all_gather(x).reshape(comm.world, x.size).sum(axis=0)
    return total


def gather_to_rank_0(comm: Comm, x: Vector) -> Vector:
    """Rank 0 gets all vectors, adds them up and hands the sum back."""
    if comm.rank != 0:
        comm.send(x, 0)
        return comm.recv(0)
    total = x.copy()
    for src in range(1, comm.world):
        total += comm.recv(src)
    for dst in range(1, comm.world):
        comm.send(total, dst)
    return total


WAYS: dict[str, Way] = {
    "ring": ring_all_reduce,
    "all-gather, then sum": all_gather_then_sum,
    "gather to rank 0": gather_to_rank_0,
}


def vector(rank: int, size: int) -> Vector:
    """Entry i of rank r is (r + 1) · (i + 1): whole numbers, exact in whatever order they add."""
    return (rank + 1) * np.arange(1.0, size + 1)


def measure_rank(comm: Comm, size: int) -> list[Sample]:
    """Try all ways, one after the other."""
    x = vector(comm.rank, size)
    return [_try(comm, way, x) for way in WAYS.values()]


def _try(comm: Comm, way: Way, x: Vector) -> Sample:
    before = comm.bytes_sent
    total = way(comm, x)
    sent = comm.bytes_sent - before
    expected = np.arange(1.0, x.size + 1) * _sum_of_ranks(comm.world)
    seconds = [_seconds(comm, way, x) for _ in range(REPEATS)]
    return Sample(sent, seconds, np.array_equal(total, expected), sha256(total.data).hexdigest())


def _seconds(comm: Comm, way: Way, x: Vector) -> float:
    comm.barrier()
    start = time.perf_counter()
    way(comm, x)
    return time.perf_counter() - start


# -- in the parent ---------------------------------------------------------------------------------


def measure(world: int, size: int) -> Traffic:
    """Run all ways on ``world`` ranks with ``size`` doubles each."""
    by_rank = spawn(measure_rank, world, size, timeout=TIMEOUT)
    by_way = [list(samples) for samples in zip(*by_rank, strict=True)]
    ring, all_gather, gather = map(_measured, WAYS, by_way)
    v = size * 8
    return Traffic(
        world=world,
        size=size,
        vector_bytes=v,
        bound=2 * (world - 1) * v / world,
        ring=ring,
        all_gather=all_gather,
        gather=gather,
        checks=[*_result_checks(world, by_way), _bytes_check(world, size, ring.sent)],
    )


def _measured(name: str, samples: list[Sample]) -> Measured:
    slowest = map(max, zip(*(sample.seconds for sample in samples), strict=True))
    return Measured(name, [sample.sent for sample in samples], median(slowest))


def _result_checks(world: int, by_way: list[list[Sample]]) -> list[Check]:
    samples = [sample for way in by_way for sample in way]
    total = _sum_of_ranks(world)
    return [
        Check(
            f"all three ways: entry i is i · {total} on every rank; sum 1..{world} = {total}",
            all(sample.correct for sample in samples),
        ),
        Check(
            "all ranks hold the same bits",
            len({sample.digest for sample in samples}) == 1,
        ),
    ]


def _bytes_check(world: int, size: int, sent: list[int]) -> Check:
    """On the ring a rank sends all chunks but its own, then all but its right neighbour's."""
    chunk = [8 * (stop - start) for start, stop in chunk_bounds(size, world)]
    exact = [2 * 8 * size - chunk[r] - chunk[(r + 1) % world] for r in range(world)]
    return Check(
        "ring: each rank sent the bytes of the chunks that it passes on, no more",
        sent == exact,
    )


def _sum_of_ranks(world: int) -> int:
    return world * (world + 1) // 2
