"""What went wrong, said so that one reading is enough: which rank, where, and what to do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinyllm.dist import diagnosis
from tinyllm.dist.board import Entry
from tinyllm.dist.errors import CommError, CommTimeout, DesyncError, RankDied, RankError
from tinyllm.dist.mailbox import Failure
from tinyllm.dist.preflight import Job

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
    def remoteness(self) -> int:
        """How far a failure is from a cause: 0 it is one, 1 a dispute, 2 a lost peer."""
        return self.failure.remoteness if self.failure else 0


def headline(report: Report) -> str:
    """``rank 1 raised ValueError: boom``."""
    when = "before its function returned" if report.started else "while starting"
    if report.failure is None:
        return f"rank {report.rank} {_ending(report.exitcode or 0)} {when}"
    if report.failure.exited:
        return f"rank {report.rank} exited {when}: {report.failure.headline}"
    starting = "" if report.started else f" {when}"
    return f"rank {report.rank} raised{starting} {report.failure.headline}"


def error(report: Report, entries: Sequence[Entry], others: Sequence[Report]) -> CommError:
    """The error that spawn raises for a failed rank; other failures stand below its headline."""
    failure = report.failure
    if failure is None:
        where = str(entries[report.rank]) if report.started else "what it printed may say why"
        message = f"{headline(report)}\n  {where}{_also(others)}"
        return RankDied(message, rank=report.rank, exitcode=report.exitcode)
    if failure.remoteness == 1:
        return _desync(report, failure, entries, others)
    ours = failure.error
    first = headline(report) if ours is None else str(ours)
    text = failure.traceback_text
    kind = type(ours) if ours else RankDied if failure.exited else RankError
    return kind(
        f"{first}{_also(others)}\n\non rank {report.rank}:\n{text}",
        rank=ours.rank if ours else report.rank,
        op=ours.op if ours else None,
        seq=ours.seq if ours else None,
        traceback_text=text,
    )


def _desync(
    report: Report, failure: Failure, entries: Sequence[Entry], others: Sequence[Report]
) -> DesyncError:
    """By now more ranks have said where they are than when the first one noticed."""
    known = diagnosis.dispute(entries)
    told = {r.rank: r.failure.traceback_text for r in (*others, report) if r.failure}
    rank = known.culprit if known and known.culprit in told else report.rank
    return DesyncError(
        f"{known or failure.headline}\n\non rank {rank}:\n{told[rank]}",
        rank=known.culprit if known else None,
        op=failure.error.op if failure.error else None,
        seq=failure.error.seq if failure.error else None,
        traceback_text=told[rank],
    )


def _also(others: Sequence[Report]) -> str:
    return "".join(f"\n  also: {headline(other)[:200]}" for other in others)


def timeout(
    job: Job, entries: Sequence[Entry], pending: Sequence[int], stacks: dict[int, str]
) -> CommTimeout:
    """The error for a run whose deadline passed: who holds it up, and a line for each rank.

    ``stacks`` has what each started rank answered when it was asked for its Python stack.
    """
    silent = [rank for rank in pending if entries[rank].waits and not stacks.get(rank)]
    blamed, sentence = diagnosis.standstill(entries, silent)
    lines = "".join(f"\n  {entries[rank]}" for rank in pending)
    shown = "".join(f"\nrank {rank} is at\n{stacks[rank]}" for rank in blamed if stacks.get(rank))
    return CommTimeout(
        f"{len(pending)} of {job.world} ranks had not returned from {job.name} after"
        f" {job.timeout:g} s: {sentence}{lines}{shown}"
        "\nif it only needs longer, pass spawn a larger timeout=, or None for no limit",
        rank=blamed[0] if len(blamed) == 1 else None,
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
