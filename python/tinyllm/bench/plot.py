"""The figures as a picture: time and bus bandwidth by size, a column for each world.

matplotlib is imported where it draws: everything else does without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyllm.bench.machine import Machine
from tinyllm.bench.sizes import written
from tinyllm.bench.table import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

FORMATS = (".png", ".svg", ".pdf")
MOST_NAMES = 12  # sizes that are written below an axis
LIMIT: dict[str, Any] = {"linestyle": ":", "color": "0.4"}


def problem(path: str) -> str | None:
    """Why ``path`` cannot become a picture; None if nothing is known against it."""
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        return f"--plot {path}: the name of a picture ends in {', '.join(FORMATS)}"
    if file.is_dir():
        return f"--plot {path}: is a directory"
    if not file.absolute().parent.is_dir():
        return f"--plot {path}: no such directory"
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        return "--plot needs matplotlib: pip install 'tinyllm-dist[plot]'"
    return None


def write(path: str, where: Machine, tables: Sequence[Table]) -> None:
    """Draw all tables in which bytes move."""
    from matplotlib.figure import Figure

    moving = [table for table in tables if table.rows[0].size]
    worlds = sorted({table.world for table in moving})
    figure = Figure(figsize=(3 + 5 * len(worlds), 8), layout="constrained")
    axes = figure.subplots(2, len(worlds), sharex=True, sharey="row", squeeze=False)
    for column, world in enumerate(worlds):
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"{world} ranks on {where.usable} core{'s' if where.usable > 1 else ''}")
        for table in (table for table in moving if table.world == world):
            color = f"C{_names(moving).index(_name(table, moving)) % 10}"
            _line(above, table, color, lambda row: row.p50 * 1e6)
            _line(below, table, color, lambda row: (row.busbw or 0) / 1e9)
        limit = _limit([table for table in moving if table.world == world])
        above.plot(list(limit), [size / speed * 1e6 for size, speed in limit.items()], **LIMIT)
        below.plot(list(limit), [speed / 1e9 for speed in limit.values()], **LIMIT)
        below.set_xlabel("size (bytes)")
    for one in axes.flat:
        _dress(one, sorted({row.size for table in moving for row in table.rows}))
    axes[0][0].set_ylabel("time of the slowest rank, p50 (µs)")
    axes[1][0].set_ylabel("bus bandwidth (GB/s)")
    figure.legend(handles=_legend(moving), loc="outside right upper", frameon=False)
    collectives = ", ".join(dict.fromkeys(table.collective for table in moving))
    figure.suptitle(f"{collectives} on {where.processor}")
    figure.savefig(path, dpi=120)


def _line(axes: Axes, table: Table, color: str, value: Callable[[Row], float]) -> None:
    """Out-of-place drawn through, in-place dashed."""
    for in_place, style in ((False, "o-"), (True, "--")):
        rows = [row for row in table.rows if row.in_place is in_place]
        sizes, values = [row.size for row in rows], [value(row) for row in rows]
        axes.plot(sizes, values, style, color=color, markersize=3)


def _limit(tables: Sequence[Table]) -> dict[int, float]:
    """The best memcpy that was seen beside any of the tables, by size."""
    best: dict[int, float] = {}
    for row in (row for table in tables for row in table.rows):
        best[row.size] = max(best.get(row.size, 0.0), row.memcpy or 0.0)
    return best


def _legend(tables: Sequence[Table]) -> list[Line2D]:
    """A colour for each way; what dashes and dots mean."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=f"C{number % 10}", label=name)
        for number, name in enumerate(_names(tables))
    ]
    lines.append(Line2D([], [], color="black", marker="o", markersize=3, label="out-of-place"))
    if any(row.in_place for table in tables for row in table.rows):
        lines.append(Line2D([], [], color="black", linestyle="--", label="in-place"))
    return [*lines, Line2D([], [], label="memcpy by all ranks", **LIMIT)]


def _names(tables: Sequence[Table]) -> list[str]:
    return list(dict.fromkeys(_name(table, tables) for table in tables))


def _name(table: Table, all_tables: Sequence[Table]) -> str:
    """What tells it from the others, apart from the world."""
    parts = {
        table.collective: {other.collective for other in all_tables},
        f"over {table.mesh}": {other.mesh for other in all_tables},
        f"by {table.algorithm or 'ring'}": {other.algorithm or "ring" for other in all_tables},
    }
    told = [part for part, values in parts.items() if len(values) > 1]
    return " ".join(told) or f"{table.collective} over {table.mesh}"


def _dress(axes: Axes, sizes: Sequence[int]) -> None:
    """Both scales logarithmic; sizes named where there is room for their names."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    room = math.log2(sizes[-1] / sizes[0]) / MOST_NAMES
    named = [sizes[-1]]
    for size in reversed(sizes):
        if math.log2(named[-1] / size) > room:
            named.append(size)
    axes.set_xticks(named, [written(size) for size in named])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
