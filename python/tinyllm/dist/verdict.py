"""What went wrong, said so that one reading is enough: which rank, where, and what to do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.dist.board import Entry
from tinyllm.dist.errors import CommError, CommTimeout, RankDied, RankError
from tinyllm.dist.mailbox import Failure

_HINTS = {
    signal.SIGKILL: "out of memory?",
    signal.SIGSEGV: "a fault in compiled code",
    signal.SIGABRT: "compiled code gave up; see standard error",
}


@dataclass
class Report:
    """What became of a rank: its value, or why there is none.

    ``failure`` is what the rank itself told; ``exitcode`` is set where its process ended in
    silence.
    """

    rank: int
    value: Any = None
    failure: Failure | None = None
    exitcode: int | None = None
    started: bool = True

    @property
    def failed(self) -> bool:
        """Whether the rank did not return."""
        return self.failure is not None or self.exitcode is not None

    @property
    def secondary(self) -> bool:
        """Whether another rank's failure is to be expected as the cause."""
        return self.failure is not None and self.failure.secondary


def headline(report: Report) -> str:
    """``rank 1 raised ValueError: boom``."""
    when = "before its function returned" if report.started else "while starting"
    if report.failure is None:
        return f"rank {report.rank} {_ending(report.exitcode or 0)} {when}"
    if report.failure.exited:
        return f"rank {report.rank} exited {when}: {report.failure.headline}"
    starting = "" if report.started else f" {when}"
    return f"rank {report.rank} raised{starting} {report.failure.headline}"


def error(report: Report, entry: Entry, others: Sequence[Report]) -> CommError:
    """The error that spawn raises for a failed rank; other failures stand below its headline."""
    also = "".join(f"\n  also: {headline(other)[:200]}" for other in others)
    failure = report.failure
    if failure is None:
        where = f"\n  {entry}" if report.started else "\n  what it printed may say why"
        return RankDied(
            f"{headline(report)}{where}{also}", rank=report.rank, exitcode=report.exitcode
        )
    text = failure.traceback_text
    if failure.error is not None:
        ours = failure.error
        message = f"{ours}{also}\n\non rank {report.rank}:\n{text}"
        return type(ours)(message, rank=ours.rank, op=ours.op, seq=ours.seq, traceback_text=text)
    message = f"{headline(report)}{also}\n\non rank {report.rank}:\n{text}"
    kind = RankDied if failure.exited else RankError
    return kind(message, rank=report.rank, traceback_text=text)


def timeout(name: str, seconds: float, world: int, pending: Sequence[Entry]) -> CommTimeout:
    """The error for a run whose deadline passed, with a line for each rank that is not done."""
    lines = "".join(f"\n  {entry}" for entry in pending)
    return CommTimeout(
        f"{len(pending)} of {world} ranks had not returned from {name} after {seconds:g} s{lines}"
        "\nif it only needs longer, pass spawn a larger timeout=, or None for no limit",
        rank=pending[0].rank if len(pending) == 1 else None,
    )


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
        hint = _HINTS.get(signal.Signals(-exitcode))
    except ValueError:
        name, hint = f"signal {-exitcode}", None
    return f"was killed by {name}{f' ({hint})' if hint else ''}"
