"""Text for a terminal or a pipe, in 80 columns: what all commands share.

rich wraps it, and leaves colours out where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import TextIOWrapper

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Block = str | Text | Table

WIDTH = 80


def console() -> Console:
    """Stdout, at most 80 columns wide: long lines of prose are hard to read."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has a █
    stdout = Console(highlight=False, markup=False, emoji=False)
    stdout.width = min(stdout.width, WIDTH)
    return stdout


def show(out: Console, heading: str, blocks: Iterable[Block], indent: int = 2) -> None:
    """Write a heading and what belongs to it."""
    with out.capture() as capture:
        out.print(Text(heading, "bold"), end="\n\n")
        for block in blocks:
            out.print(Padding(block, (0, 0, 1, indent)))
    # rich fills every line up with blanks, which would be in the way of whoever copies the text.
    out.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
    out.file.flush()


def table(first: str, *columns: str, numbers: bool = False) -> Table:
    """A table without lines; ``numbers`` aligns all columns but the first to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True, justify="right" if numbers and first else "left")
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if numbers else "left")
    return table
