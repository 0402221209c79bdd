"""The algorithms of all-reduce beside the ring, in turn and in one run: where do they cross?

    python python/tests/bench/algorithm_crossovers.py [--world 2 3 4 8] [--rounds 9] [--bytes 8 ...]

Prints the ring's median time of one all_reduce (``out=``) and, for each algorithm, the median over
the rounds of its time by the ring's of the same round: below 1 it is faster than the ring.  A round
takes every algorithm once; its time is that of the slowest rank.  "auto" is the ratio of what
``choice`` names, and the last column the fastest.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from tinyllm.dist import algorithms, cores
from tinyllm.dist.comm import Comm, spawn

SIZES = [8, 64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20]
NAMES = ["ring", *algorithms.ALGORITHMS]


def measure(comm: Comm, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per all_reduce, by algorithm and round; algorithms take turns within each round."""
    n = size // 8
    x, out = np.arange(n) + 100.0 * comm.rank, np.empty(n)
    expected = np.arange(n) * comm.world + 100.0 * sum(range(comm.world))
    repeat = max(1, min(100, (4 << 20) // size))
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(rounds):
        for name in NAMES[turn % len(NAMES) :] + NAMES[: turn % len(NAMES)]:
            out[:] = 0
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                algorithms.all_reduce(comm, x, algorithm=name, out=out)
            seconds[name].append((time.perf_counter() - start) / repeat)
            assert np.array_equal(out, expected), name
    return seconds


def medians(ranks: list[dict[str, list[float]]]) -> tuple[float, dict[str, float]]:
    """The ring's seconds, and every algorithm's ratio to it."""
    slowest = {
        name: [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in NAMES
    }
    ratios = {
        name: statistics.median(a / b for a, b in zip(turns, slowest["ring"], strict=True))
        for name, turns in slowest.items()
    }
    return statistics.median(slowest["ring"]), ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"{cores()} cores; time by the ring's\n")
    others = NAMES[1:]
    heads = "".join(f" {name:>18}" for name in others)
    print(f"{'world':>5} {'bytes':>11} {'ring µs':>10}{heads} {'auto':>6}  fastest")
    for world in options.world:
        for size in options.bytes:
            ring, ratios = medians(spawn(measure, world, size, options.rounds, timeout=None))
            columns = "".join(f" {ratios[name]:>18.2f}" for name in others)
            auto = ratios[algorithms.choice(world, size)]
            fastest = min(ratios, key=lambda name: ratios[name])
            line = f"{world:>5} {size:>11,} {ring * 1e6:>10,.1f}{columns} {auto:>6.2f}  {fastest}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
