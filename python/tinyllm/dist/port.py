"""One rank's side of the mesh: its links, the numbering of calls, the check of every header.

``Comm`` says *what* travels: chunks, neighbours, order.  A Port says *how*: it puts the
operation's header in front of each array, compares the header of what arrives before a byte of it
is used, keeps the rank's slot on the board, and remembers a failure, since after one no later
message can be trusted.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from tinyllm.dist import board as boards
from tinyllm.dist import diagnosis, frame
from tinyllm.dist.arrays import Array
from tinyllm.dist.board import DOING, INSIDE, RUNNING, WRITING, Board, Entry, stamp
from tinyllm.dist.errors import CommError, CommTimeout, DesyncError, PeerLost
from tinyllm.dist.frame import NTH, SEQ, Frame
from tinyllm.dist.link import GLANCE, Channel, Link

Room = Callable[[tuple[int, ...], np.dtype[Any]], Array]

PIECE = 1 << 19  # bytes that are added at a time, while they are in the cache and more arrive

_NOTHING = np.empty(0, np.uint8)
_CALLS = 256  # that a port remembers

# Operations whose messages carry an array each, under a header of its own, and what of that header
# the receiver cannot know beforehand.  In all others the messages carry chunks of one array.
_FREE: dict[str, tuple[str, ...]] = {
    "send": (),
    "recv": ("dtype", "shape"),
    "broadcast": ("dtype", "shape"),
    "all_gather": ("shape",),
}


class Queue(Protocol):
    """Calls that another thread makes in this one's place: see nonblocking."""

    def give_way(self, op: str) -> None:
        """``op`` begins: return when the calls made before it are done."""


@dataclass
class Ends:
    """One rank's channels, on their way into its process, and the kind of Comm to open there."""

    rank: int
    channels: list[Connection | None]  # by peer; None at the rank itself
    comm: Callable[[Port], Any]

    def open(self, board: Board) -> Any:
        """In the rank's process: the Comm over these channels."""
        return self.comm(Port(self.rank, self.channels, board))

    def close(self) -> None:
        """In the parent: an end that it kept open would hide the other side's death."""
        for channel in self.channels:
            if channel is not None:
                channel.close()


class Call:
    """An operation on arrays of one kind: its header, packed once, and how its messages travel."""

    def __init__(self, what: Frame) -> None:
        self.what, self.op, self.root = what, what.op, what.root
        self.head = what.pack()
        self.numbers = frame.numbers(self.head)  # written anew for each call
        kind = stamp(0, self.head)
        self.begun, self.done = kind | INSIDE, kind | RUNNING
        self.counts = not what.is_collective  # messages per peer, not collectives
        self.whole = what.op in _FREE
        self.chunked = what.dtype is not None and not self.whole
        fields = _FREE.get(what.op, ())
        self.free = fields if what.dtype is None or what.op == "all_gather" else ()
        unknown = {field: Frame._field_defaults[field] for field in fields}
        self.mark = what._replace(**unknown).digest  # what the headers of all ranks have in common


class Port:
    """The links of one rank, and the operation that it is in."""

    def __init__(self, rank: int, channels: Sequence[Channel | None], board: Board) -> None:
        """``channels[peer]`` leads to rank ``peer``; a rank has none to itself."""
        self.rank = rank
        self.world = len(channels)
        self.limit: Callable[[], float | None] = lambda: None  # seconds that an operation may wait
        self.queue: Queue | None = None  # of calls that come before the next operation
        self._links: list[Any] = [  # Links, by peer; None at the rank itself
            None if channel is None else Link(channel, peer, self)
            for peer, channel in enumerate(channels)
        ]
        self._board = board
        self._alarm = board.alarm()
        self._slot = board.slot(rank)
        self._words, self._head = self._slot.words, self._slot.head
        self.seq = 0  # collectives begun
        self._scratch = bytearray(frame.SIZE + PIECE)  # a header, and a piece of payload to add
        self._memory = memoryview(self._scratch)
        self._head_in = self._memory[: frame.SIZE]
        self._pieces: dict[np.dtype[Any], Array] = {}  # the scratch's payload, by dtype
        self._calls: dict[tuple[Any, ...], Call] = {}
        self.call = Call(Frame("barrier", 0))
        self._inside = False  # an operation; for ever, once one has failed
        self._failure: BaseException | None = None
        self._failed = ""  # what failed first

    # -- operations ----------------------------------------------------------------------------

    def operation(
        self, op: str, x: Array | None = None, *, redop: str = "", root: int = -1
    ) -> Port:
        """Begin ``op`` on ``x``; the with block that it stands in ends it.

        ``root`` is broadcast's source, and the other rank in send and recv.
        """
        return self.begin(self.known(op, x, redop, root))

    def known(self, op: str, x: Array | None, redop: str = "", root: int = -1) -> Call:
        """The operation's ``Call``, made when it is first seen: training repeats a few of them."""
        dtype, shape = (None, ()) if x is None else (x.dtype, x.shape)
        key = (op, dtype, shape, redop, root)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) == _CALLS:
                self._calls.clear()
            call = self._calls[key] = Call(Frame(op, 0, dtype, shape, redop, root))
        return call

    def begin(self, call: Call) -> Port:
        """Begin an operation whose ``Call`` is at hand."""
        if self.queue is not None:
            self.queue.give_way(call.op)
        if self._inside:
            raise self._refuses(call.op) from self._failure
        self._inside = True  # between these lines the interpreter lets no other thread run
        self.call = call
        if call.counts:
            counts = self._slot.sent if call.op == "send" else self._slot.received
            call.numbers[NTH] = counts[call.root] = counts[call.root] + 1
        else:
            self.seq += 1
        call.numbers[SEQ] = self.seq
        self._words[DOING] = WRITING  # as Slot.enter does
        self._head[:] = call.head
        self._words[DOING] = call.begun
        self._since = 0.0  # when the operation began to wait, if it did
        if self._alarm[0]:
            error = self._desync(f"rank {self.rank} calls {self._frame}")
            self.failed(error)
            raise error
        return self

    @property
    def _frame(self) -> Frame:
        return frame.unpack(self.call.head)

    def _refuses(self, op: str) -> RuntimeError:
        if self._failure is None:
            return RuntimeError(
                f"rank {self.rank}: {op} was called while another thread is in {self._frame};"
                " a Comm serves one thread at a time"
            )
        return CommError(
            f"rank {self.rank}: {op} on a Comm that is broken since {self._failed} failed:"
            f" {self._failure}",
            rank=self.rank,
            op=op,
        )

    def __enter__(self) -> Port:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        else:
            self.failed(error)

    def end(self) -> None:
        """The operation is done."""
        if self._failure is None:  # else it came from another thread, and stays
            self._words[DOING] = self.call.done
            self._inside = False

    def failed(self, error: BaseException) -> None:
        """The operation is not done, and no later one will be."""
        self.fail(error, str(self._frame))

    def fail(self, error: BaseException, what: str) -> None:
        """Let every later operation fail, too, because ``what`` did."""
        self._inside = True
        if self._failure is None:
            self._failure, self._failed = error, what
            self._slot.fail(getattr(error, "rank", None))

    def at_end(self, finish: Callable[[], None]) -> None:
        """Have ``finish`` called when the rank's function has returned."""
        self._board.at_end.append(finish)

    # -- messages ------------------------------------------------------------------------------

    def send(self, dst: int, x: Array) -> None:
        """Send ``x``, contiguous, behind the operation's header or, as a whole array, its own.

        An empty chunk of an array does not travel: its receiver knows that it is empty.
        """
        if self.call.chunked and not x.size:
            return
        head = self.call.head
        if self.call.whole:
            head = self._frame._replace(dtype=x.dtype, shape=x.shape).pack()
            x = x.reshape(-1)
        self._links[dst].send(head, x)

    def receive(
        self, src: int, into: Array | None = None, add: Array | None = None, room: Room = np.empty
    ) -> Array:
        """Receive what ``send`` sent: a chunk into the flat array ``into``, or a whole array.

        With ``add``, ``into`` becomes the sum of ``add`` and what arrives.  A whole array is put
        where ``room(shape, dtype)`` makes room for it.
        """
        link = self._links[src]
        if self.call.whole:
            return self._receive_whole(src, link, room)
        assert into is not None
        if self.call.chunked and not into.size:
            return into
        if add is None:
            link.recv_into(frame.SIZE + into.nbytes, self._head_in, into)
            if not self._scratch.startswith(self.call.head):
                raise self._refusal(src)
        else:
            self._receive_sum(src, link, into, add)
        return into

    def _receive_sum(self, src: int, link: Link, into: Array, add: Array) -> None:
        """Add piece by piece, while what arrived is still in the cache."""
        pieces = self._pieces.get(into.dtype)
        if pieces is None:
            count = PIECE // into.itemsize
            pieces = np.frombuffer(self._scratch, into.dtype, count, frame.SIZE)
            self._pieces[into.dtype] = pieces
        n, size = into.size, pieces.size
        stop = n if n < size else size
        end = frame.SIZE + stop * into.itemsize  # the header comes along with the first piece
        link.recv_into(end, self._memory[:end])
        if not self._scratch.startswith(self.call.head):
            raise self._refusal(src)
        if stop == n:  # often that is all
            np.add(pieces[:n], add, out=into)
            return
        np.add(pieces, add[:size], out=into[:size])
        for start in range(size, n, size):
            stop = min(start + size, n)
            end = frame.SIZE + (stop - start) * into.itemsize
            link.recv_into(end - frame.SIZE, self._memory[frame.SIZE : end])
            np.add(pieces[: stop - start], add[start:stop], out=into[start:stop])

    def _receive_whole(self, src: int, link: Link, room: Room) -> Array:
        link.recv_into(frame.SIZE, self._head_in)
        theirs = self._agreed(src)
        assert theirs.dtype is not None
        x = room(theirs.shape, theirs.dtype)
        if x.size:
            link.recv_into(x.nbytes, x.reshape(-1))
        return x

    # -- for ranks that share memory ------------------------------------------------------------

    def nod(self, peer: int) -> None:
        """Send the operation's header, and nothing else."""
        self._links[peer].send(self.call.head, _NOTHING)

    def await_nod(self, peer: int) -> None:
        """Wait for the header that ``nod`` sends."""
        self._links[peer].recv_into(frame.SIZE, self._head_in)
        if not self._scratch.startswith(self.call.head):
            self._agreed(peer)

    def agree(self, peer: int, head: bytes) -> Frame:
        """What ``peer`` shows; DesyncError unless it belongs to the call we are in."""
        if head == self.call.head:
            return self.call.what
        self._head_in[:] = head
        return self._agreed(peer)

    def disagreement(self, peer: int) -> DesyncError:
        """The error to raise: ``peer`` is in another call, as it says on the board."""
        theirs = self._board.read()[peer].frame
        assert theirs
        self._head_in[:] = theirs.pack()
        return self._refusal(peer)

    def hand_out(self, fd: int) -> int:
        """Rank 0's descriptor ``fd`` on all ranks, each with one of its own."""
        if self.rank == 0:
            for link in filter(None, self._links):
                link.send_descriptor(self.call.head, fd)
            return fd
        head, fd = self._links[0].recv_descriptor(frame.SIZE)
        self.agree(0, head)
        if fd < 0:
            raise OSError(errno.EMFILE, "no descriptor is left for an array; see ulimit -n")
        return fd

    def has_hung_up(self, peer: int) -> bool:
        """Whether ``peer`` has closed its end."""
        return bool(self._links[peer].has_hung_up())

    # -- agreement -----------------------------------------------------------------------------

    def _agreed(self, src: int) -> Frame:
        """The header that arrived, if it belongs to the call that this rank is in."""
        mine, theirs = self._frame, frame.unpack(self._scratch)
        if mine.op == "recv":
            mine = mine._replace(op="send", root=self.rank)
        if mine.op == "broadcast" and theirs.dtype is None:  # it takes whatever array comes
            mine = mine._replace(dtype=None, shape=())
        free = {field: getattr(theirs, field) for field in self.call.free}
        if mine._replace(**free) != theirs:
            raise self._refusal(src)
        return theirs

    def _refusal(self, src: int) -> DesyncError:
        """A message of ``src`` does not belong to this rank's operation: tell everybody."""
        theirs = frame.unpack(self._scratch)
        self._slot.testify(src, bytes(self._head_in))
        return self._desync(
            f"rank {self.rank} is in {self._frame}, but rank {src} sent it a message of {theirs}"
        )

    def _desync(self, what: str) -> DesyncError:
        self._alarm[0] = 1
        entries = self._board.read()
        known = diagnosis.dispute(entries)
        lines = "".join(f"\n  {entry}" for entry in entries)
        return DesyncError(
            f"{what}: {known or lines}",
            rank=known.culprit if known else None,
            op=self._frame.op,
            seq=self._frame.seq,
        )

    # -- what a link tells us --------------------------------------------------------------------

    def waiting(self, peer: int, *, sending: bool, done: int) -> None:
        """A link moved nothing for a while: say so on the board, and look whether all is well."""
        self._slot.mark(boards.SENDING if sending else boards.RECEIVING, peer)
        partly = not sending and not self.call.whole and done >= frame.SIZE
        if partly and not self._scratch.startswith(self.call.head):
            raise self._refusal(peer)  # it may be shorter than ours, and the rest will not come
        entries = self._board.read()
        if self._alarm[0] or diagnosis.dispute(entries):
            raise self._desync(f"rank {self.rank} is in {self._frame}")
        self._check_limit(entries, peer)

    def lost(self, peer: int, why: str) -> CommError:
        """A link lost its peer: it returned too early, or something happened to it.

        Or it gave up, over a rank that it says on the board, and the blame stays with that one.
        """
        entries = self._board.read()
        if diagnosis.dispute(entries):
            return self._desync(f"rank {self.rank} is in {self._frame}")
        culprit = entries[peer].blamed
        if culprit in (None, self.rank, peer):
            culprit, says = peer, ""
        else:
            says = f"; it gave up over rank {culprit}"
        return PeerLost(
            f"rank {self.rank} lost rank {peer} in {self._frame}: {why}{says}",
            rank=culprit,
            op=self._frame.op,
            seq=self._frame.seq,
        )

    def _check_limit(self, entries: list[Entry], peer: int) -> None:
        now, limit = time.monotonic(), self.limit()
        self._since = self._since or now - GLANCE
        if limit is None or now - self._since < limit:
            return
        blamed, sentence = diagnosis.standstill(entries)
        raise CommTimeout(
            f"{entries[self.rank]}, longer than comm.timeout, {limit:g} s:"
            f" {sentence or entries[peer]}",
            rank=blamed[0] if len(blamed) == 1 else None,
            op=self._frame.op,
            seq=self._frame.seq,
        )
