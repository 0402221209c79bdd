"""Where the time of an all-reduce over shared memory goes.

    python python/tests/bench/shm_profile.py

Two ranks, ``out=``, medians, microseconds.  A call is timed in three ways:

    together   with the other rank
    alone      by a rank that waits for nobody; less by what it takes to wait for the other, and to
               fetch cache lines from its core
    bare       the copies and additions that it consists of; less by what our Python takes

Then the parts of the smallest call, and how often ranks give way to each other in one, also where
there are more ranks than cores.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from tinyllm.bench import sizes
from tinyllm.dist import segment
from tinyllm.dist.arrays import Array
from tinyllm.dist.board import Board
from tinyllm.dist.comm import Comm, spawn
from tinyllm.dist.plans import BLOCK
from tinyllm.dist.segment import TRAY
from tinyllm.dist.shm import ONE_SHOT, shm_mesh

SIZES = [8, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20]
PARTS = {
    "all of it": "comm.all_reduce(x, 'sum', out=out)",
    "begin and end: number, board": "port.begin(plan.call); port.end()",
    "lay out, meet, add": "plan.run(x, out)",
    "  of that: to meet": "table.meet()",
    "  of that: a copy and an addition": "mine[...] = x; np.add(x, mine, out)",
}


def microseconds(call: Callable[[], Any], size: int) -> float:
    """The median of some calls."""
    call()
    count = max(1, min(2000, (1 << 20) // size))
    return median(timeit.repeat(call, number=count, repeat=9)) / count * 1e6


def arrays(comm: Comm, size: int, symmetric: bool) -> tuple[Array, Array]:
    """x and out."""
    out = comm.empty(size // 8) if symmetric else np.ones(size // 8)
    return (out if symmetric else np.ones(size // 8)), out


def together(comm: Comm, size: int, symmetric: bool) -> float:
    """With the other rank, each call after a barrier."""
    x, out = arrays(comm, size, symmetric)
    times = []
    for turn in range(max(9, min(2000, (32 << 20) // size))):
        x.fill(turn)
        comm.barrier()
        start = timeit.default_timer()
        comm.all_reduce(x, out=out)
        times.append(timeit.default_timer() - start)
    return median(times) * 1e6


@contextmanager
def hermit() -> Iterator[Any]:
    """Rank 0 of two, which waits for nobody, and whose other rank is always of its opinion."""
    ends, board = shm_mesh(2), Board(2)
    comm = ends[0].open(board)
    table = comm._table
    table._rounds = [(card, []) for card, _ in table._rounds]
    table.tell = lambda word: (table.meet(), [word] * 2)[1]
    try:
        yield comm
    finally:
        comm._port._links[1].close()
        ends[1].close()
        board.close()


def alone(size: int, symmetric: bool) -> float:
    """The same call by a rank that waits for nobody."""
    with hermit() as comm:
        x, out = arrays(comm, size, symmetric)
        return microseconds(lambda: comm.all_reduce(x, out=out), size)


def bare(size: int, symmetric: bool) -> float:
    """The copies and additions alone, in pieces as large as those."""
    n = size // 8
    x, theirs, place, sums = np.ones(n), np.ones(n), np.empty(n), np.empty(n)
    step = (BLOCK if symmetric else TRAY // 2) // x.itemsize

    def one_shot() -> None:
        place[...] = x
        np.add(x, theirs, sums)

    def two_shot() -> None:
        for at in range(0, n // 2, step):
            piece = slice(at, min(at + step, n // 2))
            if not symmetric:
                place[piece] = x[piece]
            np.add(theirs[piece], x[piece], sums[piece])
            theirs[piece] = sums[piece]
            if not symmetric:
                sums[n // 2 :][piece] = place[piece]

    return microseconds(one_shot if size <= ONE_SHOT else two_shot, size)


def parts() -> list[tuple[str, float]]:
    """Nanoseconds of what the smallest call does, for a rank that waits for nobody."""
    x, out, mine = np.ones(1), np.empty(1), np.empty(1)
    with hermit() as comm:
        comm.all_reduce(x, out=out)
        (plan,) = comm._at_hand.values()
        names = {"table": comm._table, "port": comm._port, "np": np} | locals()
        times = [
            min(timeit.repeat(code, globals=names, number=20_000, repeat=9))
            for code in PARTS.values()
        ]
    return [(name, time / 20_000 * 1e9) for name, time in zip(PARTS, times, strict=True)]


def giving_way(comm: Any) -> tuple[float, float]:
    """The time of a call of 8 bytes, and how often this rank gave way in it."""
    count, give_way = 0, segment._give_way

    def counted() -> None:
        nonlocal count
        count += 1
        give_way()

    segment._give_way = counted
    x, out, turns = np.ones(1), np.empty(1), 20_000
    start = timeit.default_timer()
    for _ in range(turns):
        comm.all_reduce(x, out=out)
    return (timeit.default_timer() - start) / turns * 1e6, count / turns


def main() -> None:
    """Print it."""
    print("     size  arrays     together     alone      bare")
    for symmetric in (False, True):
        kind = "symmetric" if symmetric else "private"
        for size in SIZES:
            ranks = spawn(together, 2, size, symmetric, mesh=shm_mesh, timeout=None)
            times = max(ranks), alone(size, symmetric), bare(size, symmetric)
            row = " ".join(f"{time:>9,.1f}" for time in times)
            print(f"{sizes.written(size):>9}  {kind:<9} {row}", flush=True)
    print("\n8 bytes, nobody to wait for (ns)")
    for name, time in parts():
        print(f"{name:<40} {time:>6,.0f}")
    print("\n8 bytes, call after call")
    for world in (2, 4, 8):
        times, ways = zip(*spawn(giving_way, world, mesh=shm_mesh, timeout=None), strict=True)
        print(f"{world} ranks: {max(times):6.1f} µs, each gave way {np.mean(ways):.1f} times")


if __name__ == "__main__":
    main()
