"""The figures as a picture: time and bus bandwidth by size, a column for each world.

matplotlib is imported where it draws: everything else does without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinyllm.bench.machine import Machine
from tinyllm.bench.sizes import written
from tinyllm.bench.table import Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
MOST_TICKS = 9  # sizes that are written below an axis


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
    worlds = sorted({table.world for table in moving}) or [0]
    figure = Figure(figsize=(1 + 5.5 * len(worlds), 8), layout="constrained")
    axes = figure.subplots(2, len(worlds), sharex=True, sharey="row", squeeze=False)
    for column, world in enumerate(worlds):
        above, below = axes[0][column], axes[1][column]
        here = [table for table in moving if table.world == world]
        above.set_title(f"{world} ranks on {where.usable} core{'s' if where.usable > 1 else ''}")
        _lines(above, here, moving, lambda row: row.p50 * 1e6)
        _lines(below, here, moving, lambda row: (row.busbw or 0) / 1e9)
        _limit(below, here)
        above.set_yscale("log")
        below.set_ylim(bottom=0)
        below.set_xlabel("size (bytes)")
        _ticks(below, sorted({row.size for table in moving for row in table.rows}))
    axes[0][0].set_ylabel("time of the slowest rank, p50 (µs)")
    axes[1][0].set_ylabel("bus bandwidth (GB/s)")
    if moving:
        axes[1][0].legend(fontsize="small", frameon=False)
    for one in axes.flat:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{', '.join(dict.fromkeys(table.collective for table in moving))}, on {where.processor}"
    )
    figure.savefig(path, dpi=120)


def _lines(
    axes: Axes, here: Sequence[Table], all_tables: Sequence[Table], figure: Callable[[Row], float]
) -> None:
    """A colour for each way, dashed where it is in-place."""
    names = list(dict.fromkeys(_name(table, all_tables) for table in all_tables))
    for table in here:
        name = _name(table, all_tables)
        for in_place, style in ((False, "-"), (True, "--")):
            rows = [row for row in table.rows if row.in_place is in_place]
            if rows:
                axes.plot(
                    [row.size for row in rows],
                    [figure(row) for row in rows],
                    style,
                    color=f"C{names.index(name) % 10}",
                    marker="o",
                    markersize=3,
                    label=f"{name}, in-place" if in_place else name,
                )


def _limit(axes: Axes, here: Sequence[Table]) -> None:
    """The best memcpy that was seen beside any of the tables."""
    best: dict[int, float] = {}
    for row in (row for table in here for row in table.rows if row.memcpy):
        best[row.size] = max(best.get(row.size, 0), row.memcpy or 0)
    if best:
        sizes = sorted(best)
        speeds = [best[size] / 1e9 for size in sizes]
        axes.plot(sizes, speeds, ":", color="0.5", label="memcpy by all ranks")


def _name(table: Table, all_tables: Sequence[Table]) -> str:
    """What tells it from the others, apart from the world."""
    parts = {
        table.collective: {other.collective for other in all_tables},
        f"over {table.mesh}": {other.mesh for other in all_tables},
        f"by {table.algorithm or 'ring'}": {other.algorithm or "ring" for other in all_tables},
    }
    told = [part for part, values in parts.items() if len(values) > 1]
    return " ".join(told) or f"{table.collective} over {table.mesh}"


def _ticks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = sizes[:: -(-len(sizes) // MOST_TICKS)] or []
    axes.set_xticks(shown, [written(size) for size in shown])
    axes.minorticks_off()
