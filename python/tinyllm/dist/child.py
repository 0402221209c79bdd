"""What a rank's process does: take its function from the parent, run it, ship what came of it.

An exception of the user's never travels as an object, since many do not survive pickle: its
traceback does, as text.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import io
import multiprocessing
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any, NoReturn, Protocol, TypeGuard

from tinyllm.dist import board as boards
from tinyllm.dist import mailbox
from tinyllm.dist.board import Board
from tinyllm.dist.errors import CommError, DesyncError, PeerLost
from tinyllm.dist.mailbox import Failure

# This library, and what its futures are made of.
_NOT_THEIRS = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(__file__), os.path.dirname(threading.__file__) + "/concurrent")
)
TEXT_LIMIT = 64 * 1024  # characters of a traceback that travel


class Endpoint(Protocol):
    """One rank's part of a mesh, as it travels to its process."""

    def open(self, board: Board) -> Any:
        """In the rank's process: that rank's Comm."""

    def close(self) -> None:
        """In the parent, once the rank has started: let go of what is not the parent's."""


# The parent asks for the Python stack by this signal. Nobody else uses it, and C code answers, also
# where Python does not come round to it.
SHOW_STACK = getattr(signal, "SIGRTMIN", signal.SIGUSR2)


@dataclass
class StackFile:
    """A file without a path, into which a rank writes its stack when the parent asks for it."""

    fd: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (DupFd(self.fd),)


def _reopened(fd: Any) -> StackFile:
    return StackFile(fd.detach())


def main(
    rank: int, control: Connection, endpoint: Endpoint, board: Board, stack: StackFile
) -> None:
    """The rank's whole life."""
    leave_with_parent()
    faulthandler.register(SHOW_STACK, file=stack.fd)
    parent = mailbox.RankSide(control)
    slot = board.slot(rank)
    _own_random_numbers()
    me = os.getpid()
    try:
        fn, args = pickle.loads(parent.read_job())
        parent.ship(mailbox.STARTED)
        comm = endpoint.open(board)
        slot.mark(boards.RUNNING)
        value = fn(comm, *args)
        for finish in board.at_end:
            finish()
        kind, payload, doing = mailbox.RETURNED, _pickled_result(value), boards.RETURNED
    except BaseException as error:
        kind, payload, doing = mailbox.RAISED, _pickled_failure(error), boards.FAILED
    if os.getpid() == me:  # else a fork that the function made has come back from it
        slot.mark(doing)
        parent.ship(kind, payload)
    _exit()


def _own_random_numbers() -> None:
    """A fork server may have seeded NumPy's old generator, the same for all of its ranks."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _exit() -> NoReturn:
    """End as an interpreter does, but leave its modules: taking them apart is half a short run."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    buffered = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for stream in gc.get_objects():
        if isinstance(stream, buffered):
            with suppress(Exception):  # closed, or its reader is gone
                stream.flush()
    os._exit(0)


def leave_with_parent() -> None:
    """See to it that this process, and what it starts, ends when the parent ends, however it ends.

    The rank leads a process group of its own, which the parent (or the kernel) kills as a whole,
    and which keeps Ctrl-C to the parent.  multiprocessing gives every child a pipe that closes
    when the parent is gone.  Linux can turn that into a SIGKILL, with no thread and whatever the
    rank is doing; elsewhere a thread waits for it.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets a Ctrl-C that was held until now:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent has it as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = multiprocessing.parent_process()
    assert parent is not None
    lifeline = parent.sentinel
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it was gone before we asked
            _end_group()
    else:
        threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()


def _watch(lifeline: int) -> None:
    select.select([lifeline], [], [])
    _end_group()


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)


def _pickled_result(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(value).__name__}, cannot go to the parent: {error}"
        ) from error


def _failure(error: BaseException) -> Failure:
    headline = "".join(traceback.format_exception_only(error)).strip()
    ours = _plain(error) if _is_ours(error) else None
    return Failure(
        headline=_cut(headline, TEXT_LIMIT // 8),
        traceback_text=_cut(_users_frames(error) if ours else _whole(error), TEXT_LIMIT),
        remoteness=_remoteness(error),
        exited=not isinstance(error, Exception),
        error=ours,
    )


def _pickled_failure(error: BaseException) -> bytes:
    """An exception may be such that even telling of it fails."""
    try:
        return pickle.dumps(_failure(error))
    except Exception:
        return pickle.dumps(Failure(f"{type(error).__name__} (which cannot be shown)", ""))


def _plain(error: CommError) -> CommError:
    """The error without what else may hang on it and does not pickle."""
    return type(error)(str(error), rank=error.rank, op=error.op, seq=error.seq)


def _whole(error: BaseException) -> str:
    """The traceback as Python prints it, but for the frame of ours that called the function."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    return "".join(traceback.format_exception(error)).rstrip()


def _users_frames(error: BaseException) -> str:
    """Where the user's code called the library; what the error says is in the headline."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(theirs)]
    return "\n".join(["".join(lines).rstrip(), *getattr(error, "__notes__", ())])


def _is_ours(error: BaseException) -> TypeGuard[CommError]:
    """Whether this rank's own Comm raised it: no subclass, and not what a nested spawn raised."""
    if not isinstance(error, CommError) or type(error).__module__ != CommError.__module__:
        return False
    return error.op is not None and error.traceback_text is None


def _remoteness(error: BaseException) -> int:
    """How far the error is from a cause: ``raise KeyError from lost`` is as far as ``lost``."""
    chain, seen = [error], {id(error)}
    for link in chain:
        for earlier in (link.__cause__, link.__context__, *getattr(link, "exceptions", ())):
            if isinstance(earlier, BaseException) and id(earlier) not in seen:
                seen.add(id(earlier))
                chain.append(earlier)
    own = [link for link in chain if _is_ours(link)]
    if any(isinstance(link, PeerLost) for link in own):
        return 2
    return int(any(isinstance(link, DesyncError) for link in own))


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
