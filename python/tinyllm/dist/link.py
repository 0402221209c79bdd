"""One duplex byte channel to one peer: a pipe end or a TCP socket, the same code for both.

A duplex ``multiprocessing.Pipe`` is a pair of stream sockets on Linux and macOS.  Its Connection
reads through intermediate buffers, a system call per few kilobytes; the socket underneath scatters
header and payload straight to where they belong.

The sockets block, but never for long: after each ``GLANCE`` seconds without progress the owner
looks around and may raise.  The fast path pays nothing for that.  Every way in which an operating
system reports a lost peer becomes PeerLost here, and nowhere else.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyllm.dist.errors import CommError

GLANCE = 0.05  # seconds that a blocked call stays in the kernel
LOOKS = 20  # looks at an empty link before blocking on it
HOLDS = 1 << 18  # bytes that we ask a socket to hold (Linux doubles it): twice as fast as 208 KiB
ONE_CALL = 1 << 30  # bytes; some kernels refuse 2 GiB in one call

# Being woken by the kernel takes longer than a small message does.  Looking a few times first,
# giving way to the peer in between, makes small collectives several times faster, with more ranks
# than cores too; a long wait begins some 40 microseconds later for it.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))

_DONTWAIT, _WAITALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)  # not slow enums

Buffer = Any  # contiguous memory: bytes, a memoryview, an array


class Channel(Protocol):
    """What a Link is made of: a Connection or a socket."""

    def fileno(self) -> int:
        """The open descriptor."""
        ...

    def close(self) -> None:
        """Close it."""


class Owner(Protocol):
    """Whom a Link tells what happens to it."""

    def waiting(self, peer: int, *, sending: bool, done: int) -> None:
        """Called each time that GLANCE seconds moved nothing; may raise to give up."""

    def lost(self, peer: int, why: str) -> CommError:
        """The error to raise when the peer is gone."""
        ...


class Link:
    """The stream of bytes to and from rank ``peer``; it takes over ``channel``'s descriptor."""

    def __init__(self, channel: Channel, peer: int, owner: Owner) -> None:
        self.peer = peer
        self._owner = owner
        self._socket = socket.socket(fileno=os.dup(channel.fileno()))
        channel.close()
        self._socket.setblocking(True)
        self._sendmsg: Any = self._socket.sendmsg
        self._recvmsg_into: Any = self._socket.recvmsg_into
        glance = struct.pack("ll", 0, int(GLANCE * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, glance)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HOLDS)

    def send(self, head: Buffer, body: NDArray[Any]) -> None:
        """Send ``head`` and a contiguous 1-d array; returns once the kernel has every byte."""
        total = len(head) + body.nbytes
        sent = 0
        if total <= ONE_CALL:
            try:  # the fast path has no call of ours below it
                sent = self._sendmsg((head, body))
            except OSError as error:
                self._check(error, "while sending to it")
        if sent == total:
            return
        parts = (memoryview(head), _bytes_of(body))
        while sent < total:
            moved = self._write(_rest(parts, sent))
            if not moved:
                self._owner.waiting(self.peer, sending=True, done=sent)
            sent += moved

    def recv_into(self, total: int, *buffers: Buffer) -> None:
        """Fill contiguous buffers of ``total`` bytes, one after the other, from the stream."""
        got = 0
        if total <= ONE_CALL:
            try:  # likewise
                got = self._recvmsg_into(buffers, 0, _DONTWAIT)[0]
            except BlockingIOError:
                got = self._look(buffers, total)
            except OSError as error:
                self._check(error, f"after 0 of {total:,} bytes")
        if got == total:
            return
        parts = [_bytes_of(buffer) for buffer in buffers]
        while got < total:
            moved = self._read(_rest(parts, got), _WAITALL, got, total)
            if not moved:
                self._owner.waiting(self.peer, sending=False, done=got)
            got += moved

    def send_descriptor(self, head: Buffer, fd: int) -> None:
        """Send ``head``, and with it a descriptor of the open file ``fd``."""
        while True:
            try:
                socket.send_fds(self._socket, [head], [fd])
                return
            except OSError as error:
                self._check(error, "while sending to it")
            self._owner.waiting(self.peer, sending=True, done=0)

    def recv_descriptor(self, size: int) -> tuple[bytes, int]:
        """The ``size`` bytes that ``send_descriptor`` sent, and the descriptor; -1 without one."""
        while True:
            try:
                head, fds, *_ = socket.recv_fds(self._socket, size, 1)
                break
            except OSError as error:
                self._check(error, "between messages")
            self._owner.waiting(self.peer, sending=False, done=0)
        if not head:
            raise self._owner.lost(self.peer, "it closed the connection between messages")
        return head, fds[0] if fds else -1

    def has_hung_up(self) -> bool:
        """Whether the peer has closed its end, all of it read or not."""
        poll = select.poll()
        poll.register(self._socket, 0)  # a hang-up is told without asking for it
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the channel: the peer reads what was sent, then the end of the stream."""
        self._socket.close()

    def _look(self, buffers: Sequence[Buffer], total: int) -> int:
        """Bytes read without blocking, if any came soon."""
        for _ in range(LOOKS):
            _give_way()
            moved = self._read(buffers, _DONTWAIT, 0, total)
            if moved:
                return moved
        return 0

    def _read(self, buffers: Sequence[Buffer], flags: int, got: int, total: int) -> int:
        """Bytes read; 0 where nothing came in time."""
        try:
            moved: int = self._recvmsg_into(buffers, 0, flags)[0]
        except OSError as error:
            self._check(error, f"after {got:,} of {total:,} bytes")
            return 0
        if not moved:
            where = f"after {got:,} of {total:,} bytes" if got else "between messages"
            raise self._owner.lost(self.peer, f"it closed the connection {where}")
        return moved

    def _write(self, buffers: Sequence[Buffer]) -> int:
        """Bytes written; 0 where the peer took nothing in time."""
        try:
            return int(self._sendmsg(buffers))
        except OSError as error:
            self._check(error, "while sending to it")
            return 0

    def _check(self, error: OSError, when: str) -> None:
        """Nothing moved in time: that is no error. All others mean that the peer is gone."""
        if not isinstance(error, BlockingIOError):
            raise self._owner.lost(self.peer, f"{error.strerror} {when}") from error


def _bytes_of(buffer: Buffer) -> memoryview:
    """The buffer's memory as flat bytes (through NumPy: a memoryview cannot cast zero entries)."""
    if isinstance(buffer, np.ndarray):
        buffer = buffer.view(np.uint8)
    return memoryview(buffer)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``buffers`` after ``done`` bytes, at most ONE_CALL of it."""
    rest = []
    room = ONE_CALL
    for buffer in buffers:
        part = buffer[done : done + room]
        done = max(0, done - buffer.nbytes)
        room -= part.nbytes
        rest.append(part)
    return rest
