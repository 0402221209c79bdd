"""Where it was measured: without that, a time says nothing."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tinyllm.dist import cores


@dataclass(frozen=True)
class Machine:
    """What stands in the head of the report."""

    processor: str
    system: str
    cores: int  # of the machine
    affinity: list[int] | None  # the cores that this process may use; None where nobody tells
    load: float | None  # processes that wanted to run in the last minute: is the machine quiet?
    python: str
    numpy: str
    tinyllm: str

    @property
    def usable(self) -> int:
        """The cores that this process may use, by number."""
        return self.cores if self.affinity is None else len(self.affinity)

    @property
    def quiet(self) -> bool:
        """Whether at least half of the cores had nothing else to do."""
        return self.load is None or self.load <= self.cores / 2


def here() -> Machine:
    """Ask this machine."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    try:
        load = round(os.getloadavg()[0], 2)
    except OSError:
        load = None
    try:
        ours = version("tinyllm-dist")
    except PackageNotFoundError:
        ours = "not installed"
    return Machine(
        processor=_processor(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=os.cpu_count() or cores(),
        affinity=affinity,
        load=load,
        python=platform.python_version(),
        numpy=np.__version__,
        tinyllm=ours,
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def written(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    text, rest = [], list(numbers)
    while rest:
        run = next(i for i in range(len(rest), 0, -1) if rest[i - 1] == rest[0] + i - 1)
        text.append(f"{rest[0]}-{rest[run - 1]}" if run > 1 else str(rest[0]))
        rest = rest[run:]
    return ",".join(text)
