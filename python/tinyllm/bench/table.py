"""What comes out: rows of figures, from the times that the ranks took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

import numpy as np

from tinyllm.bench.cases import Kind
from tinyllm.bench.timing import Log, Sample


@dataclass(frozen=True)
class Row:
    """One case; times in seconds, bandwidths in bytes per second (None where nothing moves)."""

    size: int  # bytes
    count: int  # entries
    type: str
    redop: str | None
    in_place: bool
    symmetric: bool  # the arrays are comm.empty's
    turns: int
    p50: float
    p99: float
    algbw: float | None
    busbw: float | None
    wrong: int  # entries, in all turns on all ranks
    memcpy: float | None


@dataclass(frozen=True)
class Table:
    """One collective on one mesh in one world."""

    collective: str
    algorithm: str | None
    mesh: str
    world: int
    rows: list[Row]


def bus_factor(collective: str, world: int) -> Fraction:
    """``busbw / algbw``, as nccl-tests has it: what the busiest link has to carry, by the size."""
    if collective == "all_reduce":
        return Fraction(2 * (world - 1), world)
    if collective in ("reduce_scatter", "all_gather"):
        return Fraction(world - 1, world)
    return Fraction(1)  # broadcast, sendrecv


def table(kind: Kind, mesh: str, ranks: Sequence[list[Log]]) -> Table:
    """The figures of all ranks' logs."""
    rows = []
    for logs in zip(*ranks, strict=True):
        copies = [log.memcpy for log in logs if log.memcpy]
        for samples in zip(*(log.samples for log in logs), strict=True):
            rows.append(_row(kind, samples, copies))
    algorithm = kind.algorithm if kind.collective == "all_reduce" else None
    return Table(kind.collective, algorithm, mesh, len(ranks), rows)


def _row(kind: Kind, samples: Sequence[Sample], copies: Sequence[Sample]) -> Row:
    first, turns = samples[0], slowest(samples)
    size = first.count * np.dtype(kind.dtype).itemsize
    p50 = median(turns)
    algbw = size / p50 if size else None
    redop = {"all_reduce": kind.op, "reduce_scatter": "sum"}.get(kind.collective)
    return Row(
        size=size,
        count=first.count,
        type=kind.dtype,
        redop=redop,
        in_place=first.in_place,
        symmetric=first.symmetric,
        turns=len(turns),
        p50=p50,
        p99=percentile(turns, 99),
        algbw=algbw,
        busbw=algbw and algbw * float(bus_factor(kind.collective, len(samples))),
        wrong=sum(sample.wrong for sample in samples),
        memcpy=size / min(slowest(copies)) if copies else None,
    )


def slowest(samples: Sequence[Sample]) -> list[float]:
    """The seconds of each turn on its slowest rank."""
    return list(map(max, zip(*(sample.seconds for sample in samples), strict=True)))


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that so many percent do not exceed: for 99 and fewer than 100, the last."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def micro(seconds: float) -> str:
    """Microseconds in at most six characters; seconds where those are not enough."""
    value = seconds * 1e6
    if value >= 999_999.5:
        return f"{seconds:.4g}s"
    return f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def giga(bandwidth: float | None) -> str:
    """GB/s, 10⁹ bytes per second."""
    return "-" if bandwidth is None else f"{bandwidth / 1e9:.2f}"
