"""The figures of the benchmark as text, for a terminal or a pipe, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from tinyllm import screen
from tinyllm.bench import Options, sizes
from tinyllm.bench.machine import Machine, written
from tinyllm.bench.table import Row, Table, giga, micro
from tinyllm.bench.timing import FEWEST
from tinyllm.screen import Block

FACTORS = {
    "all_reduce": "2(p - 1)/p · algbw",
    "reduce_scatter": "(p - 1)/p · algbw",
    "all_gather": "(p - 1)/p · algbw",
    "broadcast": "algbw",
    "sendrecv": "algbw",
}
COLUMNS = {
    "size": "B",
    "count": "",
    "type": "",
    "redop": "",
    "p50": "µs",
    "p99": "µs",
    "algbw": "GB/s",
    "busbw": "GB/s",
    "wrong": "",
    "memcpy": "GB/s",
    "turns": "",
}

WIDTHS = dict(zip(COLUMNS, (5, 8, 7, 5, 6, 6, 6, 6, 5, 6, 5), strict=True))


def show_head(out: Console, where: Machine, options: Options) -> None:
    """Where it is measured, and what the columns mean."""
    facts = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, fact in _facts(where, options):
        facts.add_row(name, fact)
    screen.show(out, "Collectives, measured on this machine", [facts, _legend(options)])


def show(out: Console, where: Machine, table: Table) -> None:
    """One table: all its sizes out-of-place, then in-place."""
    by_place = [[row for row in table.rows if row.in_place is place] for place in (False, True)]
    screen.show(out, _heading(where, table), [_grid(rows) for rows in by_place if rows])


def show_outcome(out: Console, tables: Sequence[Table]) -> None:
    """The last line: whether all results were right."""
    rows = [row for table in tables for row in table.rows]
    wrong = sum(row.wrong for row in rows)
    if wrong:
        out.print(Text(f"{wrong:,} entries are wrong.", "bold red"))
    else:
        turns = sum(row.turns for row in rows)
        out.print(Text(f"All results of {turns:,} turns are right.", "bold green"))


def _facts(where: Machine, options: Options) -> list[tuple[str, str]]:
    usable = "" if where.affinity is None else f", to be used here: {written(where.affinity)}"
    software = f"tinyllm {where.tinyllm}, Python {where.python}, NumPy {where.numpy}"
    ranks = ", ".join(f"{world} ({world / where.usable:g} a core)" for world in options.worlds)
    facts = [
        ("processor", where.processor),
        ("cores", f"{where.cores}{usable}"),
        ("system", where.system),
        ("software", software),
        ("ranks", ranks),
    ]
    if where.load is not None:
        noise = "" if where.quiet else ": others are at work, times will be too long"
        facts.append(("load", f"{where.load:.2f} in the minute before{noise}"))
    return facts


def _legend(options: Options) -> str:
    text = (
        "A turn is one call with new input. Every rank times it, from its leaving a barrier to its"
        " return, and the slowest rank's time counts; p50 and p99 are those of all turns, of which"
        f" a row has as many as fit into {options.seconds:g} s, but at least {FEWEST}. size: of the"
        " whole array; algbw: size/p50; GB: 10⁹ bytes. wrong: entries of all ranks' results, in"
        " all turns, that are not what they should be. memcpy: the best of some turns in which all"
        " ranks copy `size` bytes at the same time."
    )
    if "sendrecv" in options.collectives:
        text += " sendrecv: half the time of there and back."
    return text


def _heading(where: Machine, table: Table) -> str:
    way = "" if table.algorithm in (None, "ring") else f" by {table.algorithm}"
    cores = f"{where.usable} core{'s' if where.usable > 1 else ''}"
    heading = f"{table.collective}{way} over {table.mesh}, {table.world} ranks on {cores}"
    factor = FACTORS.get(table.collective)
    return heading + (f"; busbw = {factor}" if factor else "")


def _grid(rows: Sequence[Row]) -> Block:
    """A row per size."""
    moves = rows[0].size > 0
    title = "out-of-place" if not rows[0].in_place else "in-place"
    if rows[0].symmetric:
        title += ", symmetric arrays (comm.empty)"
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    if moves:
        grid.title, grid.title_justify, grid.title_style = title, "left", ""
    for name, unit in COLUMNS.items():
        grid.add_column(f"{name}\n{unit}", no_wrap=True, justify="right", min_width=WIDTHS[name])
    for row in rows:
        wrong = Text(f"{row.wrong:,}", "bold red" if row.wrong else "")
        grid.add_row(
            sizes.written(row.size) if moves else "-",
            str(row.count) if moves else "-",
            row.type if moves else "-",
            row.redop or "-",
            micro(row.p50),
            micro(row.p99),
            giga(row.algbw),
            giga(row.busbw),
            wrong,
            giga(row.memcpy),
            str(row.turns),
        )
    return grid
