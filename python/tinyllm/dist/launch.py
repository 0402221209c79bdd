"""The parent's verbs on processes: start them, wait for any, end all.  It knows no collectives.

    parent                                             rank r
      Process(child.main, ...)  ------- start ------->   leave_with_parent()
      control socket            ------- (fn, args) -->   unpickle            (big: written in turns)
                                <------ STARTED ------
                                <------ RETURNED -----   or RAISED           (big: read in turns)
      process descriptor        <------ it is gone ---

One loop over one selector watches all of it, so that no rank can keep the parent waiting: not one
that is stopped in the middle of a message, nor one whose grandchildren hold its descriptors open.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any

from tinyllm.dist import child, diagnosis, mailbox, verdict
from tinyllm.dist.board import Board
from tinyllm.dist.child import Endpoint
from tinyllm.dist.errors import CommError, DesyncError
from tinyllm.dist.mailbox import Failure
from tinyllm.dist.member import Member
from tinyllm.dist.preflight import Job
from tinyllm.dist.verdict import Report

TICK = 0.05  # seconds between looks at processes that no descriptor watches
GRACE = 0.25  # seconds that a consequence waits for its cause, and that a stack may take
LONGEST = 3600.0  # seconds in one call of select, which takes no more than some days
FAREWELL = 1.0  # seconds without any exit, once all results are in, until ranks are ended

_BLAS_SETTINGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_environment = threading.Lock()  # os.environ is the process's, and spawn may run in several threads


class Team:
    """The ranks of one run; the with block starts them, and none is left when it ends."""

    def __init__(self, job: Job, endpoints: Sequence[Endpoint]) -> None:
        self._job = job
        self._endpoints = endpoints
        self._deadline = time.monotonic() + job.timeout
        self._selector = selectors.DefaultSelector()
        self._members: list[Member] = []
        self._reports: deque[Report] = deque()
        self._board = Board(job.world)

    def __enter__(self) -> Team:
        try:
            resource_tracker.ensure_running()  # later, it would let Ctrl-C through that we hold
            with _blas_threads(self._job), _importable_main():
                for rank, endpoint in enumerate(self._endpoints):
                    with _signals_held():
                        self._start(rank, endpoint)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._check_accounts()
                self._say_farewell()
        finally:
            self._end()

    def wait_any(self) -> Report:
        """The next rank's value or failure; CommTimeout at the deadline."""
        while not self._reports:
            self._turn(self._deadline)
            if not self._reports and time.monotonic() >= self._deadline:
                raise self._timeout()
        report = self._reports.popleft()
        return self._settled(report) if report.remoteness else report

    def error(self, report: Report) -> CommError:
        """The error to raise for a failed rank; failures that came with it are listed in it."""
        others = [other for other in self._reports if other.failed and other.remoteness < 2]
        return verdict.error(report, self._board.read(), others)

    # -- one rank --------------------------------------------------------------------------------

    def _start(self, rank: int, endpoint: Endpoint) -> None:
        context = multiprocessing.get_context(self._job.method)
        member = Member(context, rank, self._job.payload, endpoint, self._board)
        self._members.append(member)
        endpoint.close()
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(member.mail.socket, both, (self._on_mail, member))
        self._selector.register(member.watch, selectors.EVENT_READ, (self._on_end, member))

    def _on_mail(self, member: Member, events: int) -> None:
        if member.gone:  # in this same turn; what it said has been read
            return
        if events & selectors.EVENT_WRITE and member.mail.write():
            self._selector.modify(member.mail.socket, selectors.EVENT_READ, (self._on_mail, member))
        if events & selectors.EVENT_READ and not self._read(member):
            self._selector.unregister(member.mail.socket)

    def _read(self, member: Member, to_the_end: bool = False) -> bool:
        messages, more = member.mail.read(to_the_end)
        for kind, payload in messages:
            if kind == mailbox.STARTED:
                member.started = True
            else:
                self._report(member, _opened(member.rank, kind, payload))
        return more

    def _on_end(self, member: Member, events: int) -> None:
        self._selector.unregister(member.watch)
        exitcode = member.reap()
        if member.mail.socket in self._selector.get_map():
            self._selector.unregister(member.mail.socket)
            self._read(member, to_the_end=True)  # what it said before it ended
        if not member.reported:
            self._report(member, Report(member.rank, exitcode=exitcode))

    def _report(self, member: Member, report: Report) -> None:
        if member.reported:
            return
        member.reported = True
        report.started = member.started
        self._reports.append(report)

    # -- all ranks -------------------------------------------------------------------------------

    def _turn(self, until: float) -> None:
        """Wait for anything to happen, but not beyond ``until``, and deal with it."""
        wait = max(0.0, until - time.monotonic())
        if any(member.pidfd is None for member in self._members):
            wait = min(wait, TICK)
        for key, events in self._selector.select(min(wait, LONGEST)):
            react, member = key.data
            react(member, events)
        for member in self._members:
            if not member.gone and member.pidfd is None and not member.process.is_alive():
                self._on_end(member, 0)

    def _settled(self, report: Report) -> Report:
        """A lost peer's own failure says more, and so does what all ranks say of a dispute."""
        until = min(time.monotonic() + GRACE, self._deadline)
        while time.monotonic() < until and not all(member.reported for member in self._members):
            if any(other.failed and not other.remoteness for other in self._reports):
                break
            self._turn(until)
        failed = [report, *(other for other in self._reports if other.failed)]
        cause = min(failed, key=lambda other: other.remoteness)
        if cause is not report:
            self._reports.remove(cause)
            self._reports.append(report)
        return cause

    def _timeout(self) -> CommError:
        pending = [member for member in self._members if not member.reported]
        for member in pending:
            member.ask_for_stack()
        until = time.monotonic() + GRACE
        while not all(m.stack() for m in pending if m.started) and time.monotonic() < until:
            time.sleep(0.01)
        stacks = {member.rank: member.stack() for member in pending if member.started}
        return verdict.timeout(self._job, self._board.read(), [m.rank for m in pending], stacks)

    def _check_accounts(self) -> None:
        known = diagnosis.unfinished(self._board.read())
        if known:
            raise DesyncError(f"all ranks returned, but {known}", rank=known.culprit)

    def _say_farewell(self) -> None:
        staying = len(self._members)
        until = time.monotonic() + FAREWELL
        while staying and time.monotonic() < until:
            self._turn(until)
            if staying > (staying := sum(not m.gone for m in self._members)):
                until = time.monotonic() + FAREWELL
        late = [m.rank for m in self._members if not m.gone]
        if late:
            warnings.warn(
                f"{diagnosis.named(late)} returned, but did not exit within {FAREWELL:g} s"
                " (a thread or an atexit function is still running?) and was ended",
                RuntimeWarning,
                stacklevel=4,
            )

    def _end(self) -> None:
        with _signals_held():
            self._end_all()

    def _end_all(self) -> None:
        for member in self._members:
            if not member.gone:
                member.kill()
        for member in self._members:
            if not member.gone:
                member.reap()
            member.close()
        for endpoint in self._endpoints:
            endpoint.close()
        self._selector.close()
        self._board.close()


def _opened(rank: int, kind: int, payload: bytearray) -> Report:
    """A rank's last message, unpickled."""
    try:
        content = pickle.loads(payload)
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        headline = f"{name}: its result does not unpickle in the parent: {error}"
        return Report(rank, failure=Failure(headline, ""))
    if kind == mailbox.RAISED:
        return Report(rank, failure=content)
    return Report(rank, value=content)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let no signal handler raise between a process and our knowing of it, or of its end.

    Blocking SIGINT is for the rank that starts: it inherits that, until it has left the terminal's
    group.  For us it is not enough, since the system may give the signal to a thread of BLAS; so
    Python's handlers are put off, too (they run in the main thread, and can only be set there).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handlers: dict[int, Any] = {}
    arrived: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is threading.main_thread():
        held = [s for s in signal.valid_signals() if callable(signal.getsignal(s))]
        handlers = {s: signal.signal(s, lambda *what: arrived.append(what)) for s in held}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)


@contextmanager
def _importable_main() -> Iterator[None]:
    """A main module that is read from standard input has a file in name only."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""
    if not path.startswith("<"):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


@contextmanager
def _blas_threads(job: Job) -> Iterator[None]:
    """Start ranks with cores // world BLAS threads each, where the user has not said otherwise.

    The libraries read it when they load, before any code of ours runs in the rank; a fork server
    loads them once for all runs to come, so it gets one thread.
    """
    with _environment:
        if any(name in os.environ for name in _BLAS_SETTINGS):
            yield
            return
        threads = max(1, cores() // job.world) if job.method == "spawn" else 1
        os.environ.update(dict.fromkeys(_BLAS_SETTINGS, str(threads)))
        try:
            if job.method == "forkserver":
                _start_fork_server()
            yield
        finally:
            for name in _BLAS_SETTINGS:
                del os.environ[name]


def _start_fork_server() -> None:
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload([child.__name__])
    forkserver.ensure_running()


def cores() -> int:
    """The processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
