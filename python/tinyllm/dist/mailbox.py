"""The private channel between the parent and one rank: whole messages over a socket pair.

The parent sends one message, JOB, the pickled ``(fn, args)``; the rank answers STARTED once it has
unpickled it, and at the end RETURNED with the pickled result or RAISED with a pickled Failure.
This is the only place where pickle passes between processes, and it passes between a parent and
the child that it started, nobody else.
"""

from __future__ import annotations

import os
import socket
import struct
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

from tinyllm.dist.errors import CommError

JOB, STARTED, RETURNED, RAISED = range(4)

_HEAD = struct.Struct("<BQ")  # kind, bytes that follow
_MOST = 1 << 40  # bytes of a message that can be meant
_KINDS = (STARTED, RETURNED, RAISED)
_TURN = 64  # reads before other ranks have their turn

Message = tuple[int, bytearray]


class Failure(NamedTuple):
    """Why a rank's function did not return, as the rank tells it."""

    headline: str  # "ValueError: boom"
    traceback_text: str
    remoteness: int = 0  # from a cause: 0 it is one, 1 it follows from a dispute, 2 a lost peer
    exited: bool = False  # sys.exit or KeyboardInterrupt
    error: CommError | None = None  # the exception itself, where it is one of ours


def _socket(end: Connection) -> socket.socket:
    taken = socket.socket(fileno=os.dup(end.fileno()))
    end.close()
    return taken


class RankSide:
    """The rank's end; it may block, since nobody waits for the rank but its parent."""

    def __init__(self, end: Connection) -> None:
        self._socket = _socket(end)
        self._socket.setblocking(True)  # whatever socket.setdefaulttimeout says

    def read_job(self) -> bytes:
        """The pickled ``(fn, args)``."""
        with self._socket.makefile("rb") as stream:
            _, size = _HEAD.unpack(stream.read(_HEAD.size))
            return stream.read(size)

    def ship(self, kind: int, payload: bytes = b"") -> None:
        """Send a message of any size."""
        self._socket.sendall(_HEAD.pack(kind, len(payload)))
        self._socket.sendall(payload)


class ParentSide:
    """The parent's end; it never blocks: a rank may stop in the middle of a message."""

    def __init__(self, end: Connection, job: bytes) -> None:
        self.socket = _socket(end)
        self.socket.setblocking(False)
        self._outgoing = [memoryview(_HEAD.pack(JOB, len(job))), memoryview(job)]
        self._kind: int | None = None  # of the message that is arriving; None: its head is
        self._incoming = bytearray(_HEAD.size)
        self._got = 0

    def write(self) -> bool:
        """Send what the socket takes now; True once there is no more to send."""
        while self._outgoing:
            try:
                sent = self.socket.send(self._outgoing[0])
            except BlockingIOError:
                return False
            except OSError:  # the rank is gone; its process descriptor tells
                self._outgoing.clear()
                break
            self._outgoing[0] = self._outgoing[0][sent:]
            if not self._outgoing[0]:
                del self._outgoing[0]
        return True

    def read(self, to_the_end: bool = False) -> tuple[list[Message], bool]:
        """The messages that are complete now, and whether more may come."""
        messages: list[Message] = []
        for _ in count() if to_the_end else range(_TURN):
            try:
                got = self.socket.recv_into(memoryview(self._incoming)[self._got :])
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not got:
                return messages, False
            self._got += got
            messages.extend(self._completed())
        return messages, True

    def _completed(self) -> list[Message]:
        if self._got < len(self._incoming):
            return []
        if self._kind is None:
            self._kind, size = _HEAD.unpack(self._incoming)
            if self._kind not in _KINDS or size > _MOST:  # somebody else wrote into it
                self._kind, size = RAISED, 0
            self._incoming, self._got = bytearray(size), 0
            if size:
                return []
        message = (self._kind, self._incoming)
        self._kind, self._incoming, self._got = None, bytearray(_HEAD.size), 0
        return [message]
