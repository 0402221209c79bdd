"""A progress bar on stderr, for a terminal only.

It is drawn by rank 0's process, which the parent ends with SIGKILL when the user presses Ctrl-C.
So there is nothing to undo: no hidden cursor, no colour, no thread; it writes over its own line.
"""

from __future__ import annotations

import shutil
import sys
import time

WIDTH = 30  # characters of the bar
EVERY = 0.1  # seconds between two drawings


class Bar:
    """``label ━━━━━━──── done/total unit``"""

    def __init__(self, label: str, total: int, unit: str, wanted: bool = True) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.wanted = wanted and sys.stderr.isatty()
        self._next = 0.0
        self._length = 0

    def show(self, done: int) -> None:
        """Draw it, if the last drawing is some time ago."""
        if self.wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            count = f"{done:,}/{self.total:,} {self.unit}"
            filled = WIDTH * done // self.total
            self._write(f"  {self.label} {'━' * filled:─<{WIDTH}} {count}")

    def clear(self) -> None:
        """Leave an empty line behind."""
        if self.wanted:
            self._write("")
            self._write("\r")

    def _write(self, line: str) -> None:
        line = line[: shutil.get_terminal_size().columns - 1]  # of two lines, one would stay
        sys.stderr.write("\r" + line.ljust(self._length))
        sys.stderr.flush()
        self._length = len(line)
