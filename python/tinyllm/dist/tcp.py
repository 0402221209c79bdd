"""``tcp_mesh``: ranks that reach each other over TCP on 127.0.0.1, and let nobody else in.

    parent                            rank 0             rank 1              rank 2
      a token; for each rank a          accepts 1, 2       connects to 0       connects to 0, 1
      listener on a port that                              accepts 2
      the kernel picks

A parent could connect all pairs itself and hand them out like pipes.  But a pair that the parent
made says nothing about processes that find each other by address, which is what TCP is for.  So the
ranks connect to each other; the parent only opens the listeners and passes each to its rank as a
descriptor.  Thus no port is agreed upon or raced for, a connection to a rank that has not started
yet waits in its queue, and one to a rank that is dead is refused.  Once a rank has all its peers it
closes its listener: while the ranks work, no port is open.

Until then anybody on the machine may connect.  Nobody is believed before a handshake, in which both
sides prove that they know the token, which travels as Process arguments do, through a pipe from the
parent: no command line, environment or file shows it.  c connects to a, and a speaks first:

    a -> c   magic, version, nonce A
    c -> a   magic, version, world, c, a, nonce C;  HMAC(token, "connects", nonce A, all of these)
    a -> c   HMAC(token, "welcomes", nonce A, the same)

Both nonces are fresh, so that no recording serves again; the proofs name the side and both ranks,
so that none serves elsewhere or reflected; and a proves nothing to whom it does not know.  Messages
have a fixed size and are read by layout: nothing is unpickled, or allocated because a stranger says
so.  Who fails, or is not done ``HANDSHAKE`` seconds after it was accepted, is dropped and delays
nobody, since one loop serves all connections in turn.  A rank that was dropped so tries again.

What follows the handshake is neither encrypted nor signed: it is the machine's own loopback.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tinyllm.dist import board as boards
from tinyllm.dist.board import Board, Slot
from tinyllm.dist.comm import Comm
from tinyllm.dist.errors import CommTimeout, DesyncError, PeerLost
from tinyllm.dist.frame import Frame
from tinyllm.dist.link import GLANCE, HOLDS
from tinyllm.dist.port import Port

LOOPBACK = "127.0.0.1"
HANDSHAKE = 2.0  # seconds that who connects has for the whole of its handshake
STRANGERS = 64  # connections in their handshake that a rank holds besides those of its peers
PAUSE = 0.05  # seconds until a rank that was dropped tries again

_MAGIC, _VERSION = b"tllm", 1
_CHALLENGE = struct.Struct("<4sB3x32s")
_HELLO = struct.Struct("<4sB3xIII32s")
_PROOF = 32  # bytes of SHA-256

# One side of a handshake: it yields what to say and how many bytes to wait for then, and returns
# the peer's rank and its last words.
Handshake = Generator[tuple[bytes, int], bytes, tuple[int, bytes]]


def tcp_mesh(world: int, *, timeout: float | None = 60.0) -> list[TcpEnd]:
    """A TCP connection between each pair of ranks: ``spawn(fn, 4, mesh=tcp_mesh)``.

    A rank that has waited ``timeout`` seconds (None: no limit) for others to connect raises
    CommTimeout, which names them; mostly spawn's own limit comes first.  OSError if a process may
    not have the descriptors that it takes.
    """
    _check_descriptors(world)
    listeners = [_listener() for _ in range(world)]
    ports = [listener.getsockname()[1] for listener in listeners]
    token = os.urandom(32)
    return [TcpEnd(rank, listeners[rank], ports, token, timeout) for rank in range(world)]


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(socket.SOMAXCONN)
    return listener


def _check_descriptors(world: int) -> None:
    """The parent takes a listener and six more for each rank, a rank a connection to each other.

    Strangers come on top; a rank has some sixteen of its own, the parent eight.
    """
    used = len(os.listdir("/dev/fd"))
    needed = max(used + 7 * world + 8, world + STRANGERS + 16)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if needed > limit:
        raise OSError(
            errno.EMFILE,
            f"tcp_mesh: a world of {world} needs {needed:,} descriptors in a process, but the limit"
            f" is {limit:,}; raise it (ulimit -n {needed}) or take fewer ranks",
        )


@dataclass
class TcpEnd:
    """What a rank needs to find the others, on its way into the rank's process."""

    rank: int
    listener: socket.socket
    ports: list[int]  # by rank
    token: bytes = field(repr=False)
    timeout: float | None

    def open(self, board: Board) -> Comm:
        """In the rank's process: the Comm, once all ranks are connected."""
        return Comm(Port(self.rank, _Rendezvous(self, board.slot(self.rank)).links(), board))

    def close(self) -> None:
        """In the parent: a listener that it kept open would hide the rank's death."""
        self.listener.close()


class _Stranger(Exception):
    """At the other end is somebody who does not know the token, or nobody any more."""


class _Talk:
    """One connection in its handshake; it never blocks."""

    def __init__(self, sock: socket.socket, peer: int | None, until: float) -> None:
        self.socket = sock
        self.peer = peer  # whom we connect to; None: somebody connected to us
        self.until = until
        sock.setblocking(False)

    def begin(self, handshake: Handshake) -> None:
        """Say the first words, if they are ours."""
        self._got = b""
        self._handshake = handshake
        words, self._wanted = next(handshake)
        self._say(words)

    def go_on(self) -> int | None:
        """Read what has come; the peer's rank once both sides have proved what they must."""
        try:
            got = self.socket.recv(self._wanted - len(self._got))
        except BlockingIOError:
            return None
        if not got:
            raise _Stranger("it hung up")
        self._got += got
        if len(self._got) < self._wanted:
            return None
        heard, self._got = self._got, b""
        try:
            words, self._wanted = self._handshake.send(heard)
        except StopIteration as end:
            peer, words = end.value
            self._say(words)
            return int(peer)
        self._say(words)
        return None

    def _say(self, words: bytes) -> None:
        if words and self.socket.send(words) < len(words):
            raise _Stranger("it does not listen")  # a new connection has room for these few


class _Rendezvous:
    """One rank on its way to its peers: it connects to lower ranks, and higher ones to it."""

    def __init__(self, end: TcpEnd, slot: Slot) -> None:
        self._rank = end.rank
        self._world = len(end.ports)
        self._end = end
        self._slot = slot
        self._links: list[socket.socket | None] = [None] * self._world
        self._talks: list[_Talk] = []
        self._selector = selectors.DefaultSelector()
        self._due = dict.fromkeys(range(self._rank), 0.0)  # when to connect to whom

    def links(self) -> list[socket.socket | None]:
        """A connection to each other rank, by rank.

        Waiting, the rank shows on the board as in barrier #0, the one that comes before all others.
        """
        self._slot.enter(Frame("barrier", 0).pack())
        try:
            self._meet()
        except BaseException:
            for link in filter(None, self._links):
                link.close()
            raise
        finally:
            for talk in self._talks:
                talk.socket.close()
            self._selector.close()
            self._end.listener.close()
        self._slot.forget()
        return self._links

    def _meet(self) -> None:
        limit = self._end.timeout
        start = time.monotonic()
        self._end.listener.setblocking(False)
        self._selector.register(self._end.listener, selectors.EVENT_READ)
        while missing := self._missing():
            self._slot.mark(boards.RECEIVING, missing[0])
            self._connect()
            for key, _ in self._selector.select(GLANCE):
                if key.data is None:
                    self._accept()
                elif key.data in self._talks:  # it has not been dropped in this same turn
                    self._go_on(key.data)
            now = time.monotonic()
            for talk in [talk for talk in self._talks if talk.until < now]:
                self._drop(talk)
            if limit is not None and now - start > limit:
                raise self._timeout(limit)

    def _missing(self) -> list[int]:
        return [
            rank for rank, link in enumerate(self._links) if link is None and rank != self._rank
        ]

    # -- connections -----------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to those lower ranks whose time has come; how it went, the next read tells."""
        for peer in [peer for peer, when in self._due.items() if when <= time.monotonic()]:
            del self._due[peer]
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            # Its handshake begins when the peer, which may not have started yet, says its first
            # word, and may take as long as the peer lets it.
            talk = _Talk(sock, peer, math.inf)
            code = sock.connect_ex((LOOPBACK, self._end.ports[peer]))
            if code in (0, errno.EINPROGRESS):
                self._add(talk, self._connecting(peer))
            else:
                sock.close()
                self._try_again(peer, code)

    def _accept(self) -> None:
        try:
            sock, _ = self._end.listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        self._add(_Talk(sock, None, time.monotonic() + HANDSHAKE), self._accepting(sock))
        incoming = [talk for talk in self._talks if talk.peer is None]
        if len(incoming) > STRANGERS + self._world:
            self._drop(incoming[0])  # a peer would have been done long ago

    def _add(self, talk: _Talk, handshake: Handshake) -> None:
        self._talks.append(talk)
        self._selector.register(talk.socket, selectors.EVENT_READ, talk)
        with self._dropping(talk):
            talk.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Left to itself the kernel lets it grow to megabytes, which leave the cache: all_reduce
            # of 4 MiB takes a fifth longer then, and how much a link holds depends on its past.
            talk.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HOLDS)
            talk.begin(handshake)

    def _go_on(self, talk: _Talk) -> None:
        peer = None
        with self._dropping(talk):
            peer = talk.go_on()
        if peer is not None:
            self._links[peer] = talk.socket
            self._selector.unregister(talk.socket)
            self._talks.remove(talk)

    @contextmanager
    def _dropping(self, talk: _Talk) -> Iterator[None]:
        """Who cannot hold the handshake is dropped; if it should be a peer, we try again."""
        try:
            yield
        except (OSError, _Stranger) as error:
            self._drop(talk)
            if talk.peer is not None:
                self._try_again(talk.peer, getattr(error, "errno", None))

    def _drop(self, talk: _Talk) -> None:
        self._selector.unregister(talk.socket)
        self._talks.remove(talk)
        talk.socket.close()

    def _try_again(self, peer: int, code: int | None) -> None:
        """The peer had too many guests, or was stopped for a while; or it is gone."""
        if code == errno.ECONNREFUSED:
            raise PeerLost(
                f"rank {self._rank} lost rank {peer} before they met: it does not accept"
                " connections any more",
                rank=peer,
                op="rendezvous",
                seq=0,
            )
        self._due[peer] = time.monotonic() + PAUSE

    def _timeout(self, limit: float) -> CommTimeout:
        missing = self._missing()
        return CommTimeout(
            f"rank {self._rank} waited {limit:g} s for the others to connect: missing ranks"
            f" {missing}",
            rank=missing[0] if len(missing) == 1 else None,
            op="rendezvous",
            seq=0,
        )

    # -- the handshake ---------------------------------------------------------------------------

    def _accepting(self, sock: socket.socket) -> Handshake:
        nonce = os.urandom(32)
        heard = yield _CHALLENGE.pack(_MAGIC, _VERSION, nonce), _HELLO.size + _PROOF
        hello, proof = heard[: _HELLO.size], heard[_HELLO.size :]
        if not hmac.compare_digest(proof, self._proof(b"connects", nonce, hello)):
            raise _Stranger("it does not know the token")
        _, version, world, peer, wanted, _ = _HELLO.unpack(hello)
        self._check(version, world, peer, wanted, sock)
        return peer, self._proof(b"welcomes", nonce, hello)

    def _connecting(self, peer: int) -> Handshake:
        _, _, nonce = _CHALLENGE.unpack((yield b"", _CHALLENGE.size))
        mine = os.urandom(32)
        hello = _HELLO.pack(_MAGIC, _VERSION, self._world, self._rank, peer, mine)
        proof = yield hello + self._proof(b"connects", nonce, hello), _PROOF
        if not hmac.compare_digest(proof, self._proof(b"welcomes", nonce, hello)):
            raise _Stranger("it does not know the token")
        return peer, b""

    def _proof(self, side: bytes, nonce: bytes, hello: bytes) -> bytes:
        return hmac.digest(self._end.token, side + nonce + hello, "sha256")

    def _check(self, version: int, world: int, peer: int, wanted: int, sock: socket.socket) -> None:
        """Somebody who knows the token has no place here: two runs, or two ranks, were mixed up."""
        me = f"rank {self._rank}"
        wrong = ""
        if version != _VERSION:
            wrong = f"it speaks version {version}, {me} version {_VERSION}"
        elif world != self._world:
            wrong = f"its world is {world}, {me}'s is {self._world}"
        elif wanted != self._rank:
            wrong = f"it wants rank {wanted}, and this is {me}"
        elif not self._rank < peer < world:
            wrong = f"to {me} connect ranks {self._rank + 1} to {world - 1}"
        elif (link := self._links[peer]) is not None:
            ports = link.getpeername()[1], sock.getpeername()[1]
            wrong = f"there are two of it, on ports {ports[0]} and {ports[1]}"
        if wrong:
            raise DesyncError(
                f"{me} was connected to by rank {peer}, but {wrong}",
                rank=peer,
                op="rendezvous",
                seq=0,
            )
