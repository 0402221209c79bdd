"""One rank as the parent sees it: its process, its mail, its stack, its end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

from tinyllm.dist import child
from tinyllm.dist.board import Board, anonymous_file
from tinyllm.dist.child import Endpoint, StackFile
from tinyllm.dist.mailbox import ParentSide


class Member:
    """A rank's process, started."""

    def __init__(
        self, context: BaseContext, rank: int, job: bytes, endpoint: Endpoint, board: Board
    ) -> None:
        self.rank = rank
        self.started = False  # its function runs
        self.reported = False  # it has told what came of that
        self.gone = False  # its process has ended
        self._stack = StackFile(anonymous_file(f"stack of rank {rank}"))
        ours, theirs = context.Pipe(duplex=True)
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=child.main,
            args=(rank, theirs, endpoint, board, self._stack),
            name=f"rank {rank}",
        )
        try:
            self.process.start()
        except BaseException:
            os.close(self._stack.fd)
            raise
        theirs.close()
        self.mail = ParentSide(ours, job)
        # A sentinel is a pipe, which the rank's own children inherit and keep open; a pidfd is not.
        # (A rank of a fork server is no child of ours, and its sentinel is the server's.)
        own_child = context.get_start_method() == "spawn"
        self.pidfd = _pidfd(self.process) if own_child else None
        self.watch = self.process.sentinel if self.pidfd is None else self.pidfd

    def ask_for_stack(self) -> None:
        """Have the rank write its Python stack, if its process can do anything at all."""
        if self.started and not self.gone:
            with suppress(ProcessLookupError):  # ended just now, and its fork server has reaped it
                os.kill(self._pid, child.SHOW_STACK)

    def stack(self) -> str:
        """What it has written, "" as long as it has not: innermost call first, without our own."""
        text = os.pread(self._stack.fd, 1 << 16, 0).decode(errors="replace")
        current = text.partition("Current thread")[2].split("\n\n")[0].splitlines()[1:]
        return "\n".join(line for line in current if "multiprocessing" not in line and _own(line))

    def kill(self) -> None:
        """End the rank and what it started; SIGKILL also ends what is stopped or stuck in C."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the end of the process, its group's included; return the exit code."""
        self.kill()
        self.process.join()
        self.gone = True
        return self.process.exitcode or 0

    def close(self) -> None:
        """Give back what the parent holds of a process that is gone."""
        self.mail.socket.close()
        with suppress(ValueError):  # somebody else reaped it, and multiprocessing does not know
            self.process.close()
        os.close(self._stack.fd)
        if self.pidfd is not None:
            os.close(self.pidfd)

    @property
    def _pid(self) -> int:
        return self.process.pid or 0


def _own(line: str) -> bool:
    """Whether a line of a stack is the user's: not the start of the process."""
    return child.__file__ not in line and '"<string>"' not in line


def _pidfd(process: BaseProcess) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(process.pid or 0)
    except OSError:  # an old kernel, or a sandbox that forbids it
        return None
