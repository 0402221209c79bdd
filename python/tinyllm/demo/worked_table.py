"""Part 1: the chapter's worked table, filled in from the messages of a real run.

spawn takes a *mesh*: a function that makes, for each rank, the endpoint from which its process
opens a Comm.  Here the endpoints open a Comm that logs what each step of the ring sends and
receives.  Which chunk that is, the log reads off from where the array lies in memory; it does not
know the ring's formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.demo.check import Check
from tinyllm.dist import Comm, chunk_bounds, pipe_mesh, spawn

Array = NDArray[Any]

INPUTS = ([1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0])


@dataclass(frozen=True)
class Move:
    """What one rank did in one step of a ring."""

    sent_chunk: int
    sent: list[float]
    held_chunk: int  # the chunk that it received
    own: list[float] | None  # what it added to it; None where it only kept a copy
    held: list[float]  # what it has of that chunk afterwards


@dataclass(frozen=True)
class Row:
    """One step of all ranks: a row of the chapter's table."""

    step: str  # "RS 0" is the first step of the reduce-scatter, "AG 0" of the all-gather
    moves: list[Move]  # by rank


@dataclass(frozen=True)
class WorkedTable:
    """The whole table and what came out of it."""

    inputs: list[list[float]]
    rows: list[Row]
    results: list[list[float]]  # by rank
    bytes_sent: list[int]  # by rank
    bytes_expected: int  # 2 (p - 1)/p · n · 8
    checks: list[Check]


# -- in the ranks ----------------------------------------------------------------------------------


class TracedComm(Comm):
    """A Comm that keeps a log of its steps; the algorithms are the library's own."""

    def __init__(self, port: Any) -> None:
        super().__init__(port)
        self.log: list[Move] = []

    def _exchange(self, outgoing: Array, into: Array | None, add: Array | None = None) -> Array:
        sent = outgoing.tolist()  # before the step: what is sent or added may be overwritten in it
        own = None if add is None else add.tolist()
        held = super()._exchange(outgoing, into, add)
        chunks = chunk_of(outgoing, self.world), chunk_of(held, self.world)
        self.log.append(Move(chunks[0], sent, chunks[1], own, held.tolist()))
        return held


def chunk_of(part: Array, world: int) -> int:
    """Which chunk ``part`` is of the array that it is a view of, by its address."""
    whole = part if part.base is None else part.base
    assert isinstance(whole, np.ndarray)
    start = (_address(part) - _address(whole)) // part.itemsize
    return [first for first, _ in chunk_bounds(whole.size, world)].index(start)


def _address(x: Array) -> int:
    return int(x.__array_interface__["data"][0])


def traced_mesh(world: int) -> list[Any]:
    """The endpoints of pipe_mesh, opening as a TracedComm."""
    return [replace(endpoint, comm=TracedComm) for endpoint in pipe_mesh(world)]


def reduce_traced(
    comm: TracedComm, inputs: list[list[float]]
) -> tuple[list[float], int, list[Move]]:
    """One all_reduce: its result, the bytes it sent and its log."""
    total = comm.all_reduce(np.array(inputs[comm.rank]))
    return total.tolist(), comm.bytes_sent, comm.log


# -- in the parent ---------------------------------------------------------------------------------


def measure() -> WorkedTable:
    """Run the chapter's example on three ranks."""
    inputs = [list(x) for x in INPUTS]
    results, bytes_sent, logs = zip(
        *spawn(reduce_traced, len(inputs), inputs, mesh=traced_mesh), strict=True
    )
    return table(inputs, list(results), list(bytes_sent), list(logs))


def table(
    inputs: list[list[float]],
    results: list[list[float]],
    bytes_sent: list[int],
    logs: list[list[Move]],
) -> WorkedTable:
    """What the ranks report, as rows, and checked."""
    world, n = len(inputs), len(inputs[0])
    steps = [list(moves) for moves in zip(*logs, strict=True)]
    adds = [moves[0].own is not None for moves in steps]
    rows = [Row(_name(adds, index), moves) for index, moves in enumerate(steps)]
    expected = 2 * (world - 1) * n * 8 // world
    total = [sum(column) for column in zip(*inputs, strict=True)]
    checks = [
        Check(
            "every rank holds the sum of the inputs, the same bits",
            all(r == total for r in results),
        ),
        Check(
            "each step: a rank holds what its left neighbour sent (RS: and its own)",
            all(_adds_up(row.moves, rank) for row in rows for rank in range(world)),
        ),
        Check(
            f"every rank sent 2 · {world - 1}/{world} · {n} · 8 = {expected} bytes",
            all(sent == expected for sent in bytes_sent),
        ),
    ]
    return WorkedTable(inputs, rows, results, bytes_sent, expected, checks)


def _name(adds: list[bool], index: int) -> str:
    """RS while the ranks add, AG while they copy; each counted from 0."""
    return f"{'RS' if adds[index] else 'AG'} {adds[:index].count(adds[index])}"


def _adds_up(moves: list[Move], rank: int) -> bool:
    move, left = moves[rank], moves[rank - 1]
    own = move.own or [0.0] * len(move.held)
    return move.held_chunk == left.sent_chunk and move.held == [
        mine + arrived for mine, arrived in zip(own, left.sent, strict=True)
    ]
