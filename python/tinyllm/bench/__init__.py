"""``tinyllm bench``: what the collectives take on this machine, as nccl-tests tells it.

    sizes     8:32M, in steps
    cases     a collective, its arrays, and what the result has to be
    timing    the clock, in every rank
    table     rows of figures, from the ranks' times
    machine   where it was measured
    report    the figures as text
    plot      the figures as a picture

Ranks measure in rooms ``cases`` and ``timing``; everything else is the parent's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinyllm import dist
from tinyllm.bench import machine, plot
from tinyllm.bench.cases import CASES, Kind
from tinyllm.bench.sizes import written
from tinyllm.bench.table import Row, Table, table
from tinyllm.bench.timing import measure_rank
from tinyllm.dist import algorithms, spawn

COLLECTIVES = tuple(CASES)
ALGORITHMS = ("ring", *algorithms.ALGORITHMS, "auto")
DTYPES = (
    *("float64", "float32", "float16"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
ARRAYS = 6  # of a row's size on every rank, at the most, temporary ones included


class BenchError(ValueError):
    """What the user asked for cannot be measured; the message is one line."""


@dataclass(frozen=True)
class Options:
    """What ``tinyllm bench`` was asked for; ``sizes`` in bytes, ``seconds`` for each row."""

    collectives: Sequence[str]
    meshes: Sequence[str]
    algorithms: Sequence[str]
    worlds: Sequence[int]
    sizes: Sequence[int]
    op: str
    dtype: str
    seconds: float


def check_plot(path: str, options: Options) -> None:
    """BenchError if no picture can come of it, before anything is measured."""
    if list(options.collectives) == ["barrier"]:
        raise BenchError("--plot draws over the size, and a barrier has none")
    if problem := plot.problem(path):
        raise BenchError(problem)


def plotted(path: str, where: machine.Machine, tables: Sequence[Table]) -> None:
    """Write the picture."""
    plot.write(path, where, tables)


def meshes() -> dict[str, Callable[[int], Any]]:
    """The meshes that the library has, by the name that ``--mesh`` takes."""
    found = ((name, getattr(dist, f"{name}_mesh", None)) for name in ("pipe", "tcp", "shm"))
    return {name: mesh for name, mesh in found if mesh}


def measured(options: Options) -> Iterator[Table]:
    """One table after the other; BenchError before the first if one of them cannot be done."""
    _check(options)
    counts = counts_of(options.sizes, options.dtype)
    for collective in options.collectives:
        for world in options.worlds:
            for mesh in options.meshes:
                for algorithm in options.algorithms if collective == "all_reduce" else ("ring",):
                    op = options.op if collective == "all_reduce" else "sum"
                    kind = Kind(collective, algorithm, op, options.dtype)
                    yield _table(kind, mesh, world, counts, options.seconds)


def counts_of(sizes: Sequence[int], dtype: str) -> list[int]:
    """Whole entries, at least one, of so many bytes."""
    itemsize = np.dtype(dtype).itemsize
    return sorted({max(1, size // itemsize) for size in sizes})


def _table(kind: Kind, mesh: str, world: int, counts: list[int], seconds: float) -> Table:
    """Start the ranks, let them measure, add their times up."""
    label = f"{kind.collective}, {mesh}, {world} ranks"
    if kind.collective == "barrier":
        counts = [0]
    ranks = spawn(
        measure_rank,
        world,
        kind,
        counts,
        seconds,
        label,
        timeout=None,  # a rank that waits in vain says so itself
        mesh=meshes()[mesh],
        method="forkserver",
    )
    return table(kind, mesh, ranks)


def _check(options: Options) -> None:
    if options.op == "mean" and not options.dtype.startswith("float"):
        raise BenchError(f"--op mean: the mean of {options.dtype} is no {options.dtype}")
    if list(options.algorithms) != ["ring"] and "all_reduce" not in options.collectives:
        raise BenchError("--algorithm is for all_reduce; the others have one way each")
    world, size = max(options.worlds), max(options.sizes)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if world * ARRAYS * size > memory:
        raise BenchError(
            f"--world {world}, {written(size)} bytes: takes {world * ARRAYS * size / 1e9:,.1f} GB,"
            f" and this machine has {memory / 1e9:,.1f} GB"
        )


def all_right(tables: Sequence[Table]) -> bool:
    """Whether every entry of every result was what it should be."""
    return not any(row.wrong for table in tables for row in table.rows)


def shown(where: machine.Machine, options: Options, tables: Iterable[Table]) -> list[Table]:
    """Write each table to stdout as soon as it is measured; then return them all."""
    try:
        from tinyllm import screen  # here, because the library does without rich
        from tinyllm.bench import report
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "rich":
            raise
        raise BenchError("tinyllm bench needs rich: pip install 'tinyllm-dist[cli]'") from None
    out, done = screen.console(), []
    out.width = screen.WIDTH  # a narrower terminal may wrap a row, but never lose a figure of it
    report.show_head(out, where, options)
    for one in tables:
        report.show(out, where, one)
        done.append(one)
    report.show_outcome(out, done)
    return done


def to_json(where: machine.Machine, options: Options, tables: Sequence[Table]) -> str:
    """All figures as one JSON object; ``schema`` grows when the meaning of a key changes."""
    figures = {
        "schema": 1,
        "ok": all_right(tables),
        "units": {"time": "s", "bandwidth": "B/s", "size": "B"},
        "machine": asdict(where),
        "options": asdict(options),
        "tables": [asdict(one) for one in tables],
    }
    return json.dumps(figures)


__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "DTYPES",
    "BenchError",
    "Options",
    "Row",
    "Table",
    "all_right",
    "check_plot",
    "counts_of",
    "measured",
    "meshes",
    "plotted",
    "shown",
    "to_json",
]
