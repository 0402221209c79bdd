"""The clock: how one rank times a case, turn after turn, in step with the others.

    fill the input, spoil the output      not timed
    barrier                               not timed
    the call                              timed, on every rank
    compare the whole result              not timed

The time of a turn is that of its slowest rank.  Peers are timed by the same loop: it asks of a
``comm`` no more than rank, world, barrier, send and recv.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from tinyllm.bench.cases import CASES, Case, Kind, Memcpy
from tinyllm.dist import Comm
from tinyllm.progress import Bar

WARM_UP = 2  # turns that are compared, but not timed
SETTLE = 0.3  # seconds at the start that do not count: systems take time to spread ranks over cores
FEWEST = 5  # turns, however long they take
COPY_SHARE = 0.1  # of the seconds of a row, for the memcpy beside it
PATIENCE = 60.0  # seconds that an operation may wait for a peer


@dataclass(frozen=True)
class Sample:
    """What one rank has to say about one case."""

    count: int
    in_place: bool
    symmetric: bool
    seconds: list[float]  # by turn
    wrong: int  # entries, in all turns


@dataclass(frozen=True)
class Log:
    """What one rank has to say about one number of entries."""

    samples: list[Sample]
    memcpy: Sample | None


def measure_rank(
    comm: Comm, kind: Kind, counts: list[int], seconds: float, label: str = ""
) -> list[Log]:
    """Time all counts, out-of-place and in-place; rank 0 shows a progress bar if it has a label."""
    comm.timeout = PATIENCE
    make = CASES[kind.collective]
    places = (False, True) if make.in_place_too else (False,)
    bar = Bar(label, len(counts) * len(places), "rows", wanted=bool(label) and comm.rank == 0)
    logs, rows = [], 0
    timed(make(comm, kind, counts[0]), min(SETTLE, 3 * seconds))
    for count in counts:
        samples = []
        for in_place in places:
            bar.show(rows)
            samples.append(timed(make(comm, kind, count, in_place), seconds))
            rows += 1
        memcpy = timed(Memcpy(comm, kind, count), COPY_SHARE * seconds) if count else None
        logs.append(Log(samples, memcpy))
    bar.clear()
    return logs


def timed(case: Case, seconds: float) -> Sample:
    """Turns for about ``seconds``, what is not timed included; the ranks agree on their number."""
    comm, times, wrong = case.comm, list[float](), 0
    turns, start = WARM_UP, 0.0
    while turns:
        for _ in range(turns):
            turn = len(times)
            case.fill(turn)
            comm.barrier()
            before = time.perf_counter()
            case.call()
            times.append(time.perf_counter() - before)
            wrong += case.wrong(turn)
        if len(times) == WARM_UP:
            turns, start = FEWEST, time.perf_counter()
        else:
            turns = _agreed(comm, len(times) - WARM_UP, time.perf_counter() - start, seconds)
    trips = [spent / case.trips for spent in times[WARM_UP:]]
    return Sample(case.count, case.in_place, case.symmetric, trips, wrong)


def _agreed(comm: Comm, turns: int, elapsed: float, seconds: float) -> int:
    """How many turns are to follow: as rank 0 sees it, for a first guess may be far out."""
    if comm.rank != 0:
        return int(comm.recv(0))
    left = int(turns * (seconds - elapsed) / elapsed)
    more = max(0, min(turns, left))
    for dst in range(1, comm.world):
        comm.send(np.array(more), dst)
    return more
