"""What a run costs before and after its function: the start of ranks, against what they import.

    python python/tests/bench/launch.py

Least of some runs each, in milliseconds.  A rank is a fresh interpreter, so that it cannot start
sooner than one that imports what every rank needs; a fork server has all of that at hand, from the
second run on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from tinyllm.dist.comm import Comm, spawn

RUNS = 7
IMPORTS = ["sys", "multiprocessing.spawn", "numpy", "multiprocessing.spawn, numpy", "tinyllm.dist"]


def trivial(comm: Comm) -> None:
    """What the ranks do."""


def least(call: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    """Print the table."""
    with_bytecode = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    for names in IMPORTS:
        command = [sys.executable, "-c", f"import {names}"]
        took = least(lambda command=command: subprocess.run(command, check=True, env=with_bytecode))
        print(f"python -c 'import {names}'".ljust(55), f"{took:6.0f}")
    for method in ("spawn", "forkserver"):
        for world in (1, 2, 4):
            took = least(lambda m=method, w=world: spawn(trivial, w, method=m))
            print(f"spawn(trivial, {world}, method={method!r})".ljust(55), f"{took:6.0f}")


if __name__ == "__main__":
    main()
