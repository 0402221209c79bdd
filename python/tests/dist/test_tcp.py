"""The rendezvous over TCP: ranks find each other, nobody else gets in, nothing is left open.

The attacker stands on a raw socket, and speaks the handshake as the docstring of tcp.py has it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from dist_worlds import data, hang_up, ring_sum

from tinyllm.dist import (
    CommTimeout,
    DesyncError,
    FrameError,
    PeerLost,
    RankDied,
    RankError,
    frame,
    tcp,
)
from tinyllm.dist.board import Board
from tinyllm.dist.comm import Comm, spawn
from tinyllm.dist.tcp import TcpEnd, tcp_mesh

SOON = 5.0  # seconds for what takes milliseconds, on a busy machine
CHALLENGE, HELLO, PROOF = 40, 52, 32  # bytes of the handshake's messages


@pytest.fixture(scope="module", autouse=True)
def _fork_server():
    """Start it outside the tests that count descriptors: one stays open for the server."""
    spawn(total, 1, method="forkserver")


def total(comm: Comm) -> float:
    return float(comm.all_reduce(comm.rank + 1.0))


def big_total(comm: Comm, n: int = 300_001) -> bool:
    parts = [data(rank, n) for rank in range(comm.world)]
    return np.array_equal(comm.all_reduce(parts[comm.rank]), ring_sum(parts))


@contextmanager
def threads(ends: list[TcpEnd], fn: Callable = total) -> Iterator[Callable[..., list[Future]]]:
    """``start(0, 2)`` opens these ranks, each in a thread, and runs ``fn`` there."""
    board = Board(len(ends))
    comms: list[Comm] = []
    for end in ends:
        end.timeout = min(end.timeout, 2 * SOON)  # so that a test that fails does end

    def rank(end: TcpEnd):
        comm = end.open(board)
        comms.append(comm)
        comm.timeout = comm.timeout or 10.0
        return fn(comm)

    with ThreadPoolExecutor(len(ends)) as pool:
        yield lambda *ranks: [pool.submit(rank, ends[number]) for number in ranks]
    for comm in comms:
        hang_up(comm)
    for end in ends:
        end.close()
    board.close()


def call(end: TcpEnd, rank: int = 0) -> socket.socket:
    """A stranger's connection to a rank."""
    sock = socket.create_connection(("127.0.0.1", end.ports[rank]), timeout=SOON)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = sock.recv(size - len(got))
        if not more:
            break
        got += more
    return got


def is_dropped(sock: socket.socket, within: float = SOON) -> bool:
    """Whether the other side hangs up; what it says before is its challenge and no more."""
    sock.settimeout(within)
    heard = b""
    with suppress(ConnectionError):
        while more := sock.recv(1000):
            heard += more
    sock.close()
    return len(heard) <= CHALLENGE


def hello(
    sock: socket.socket, token: bytes, version=1, world=3, rank=2, to=0, side=b"connects"
) -> bytes:
    """Speak as rank 2 of 3, or as whoever; returns what was said."""
    nonce = read(sock, CHALLENGE)[8:]
    said = struct.pack("<4sB3xIII32s", b"tllm", version, world, rank, to, os.urandom(32))
    said += hmac_sha256(token, side + nonce + said)
    sock.sendall(said)
    return said


def hmac_sha256(key: bytes, text: bytes) -> bytes:
    """RFC 2104, from the hash alone."""
    from hashlib import sha256

    inner, outer = (bytes(k ^ pad for k in key.ljust(64, b"\0")) for pad in (0x36, 0x5C))
    return sha256(outer + sha256(inner + text).digest()).digest()


# -- it works --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 16])
def test_ranks_meet(world: int) -> None:
    assert (
        spawn(total, world, mesh=tcp_mesh, method="forkserver") == [sum(range(world + 1))] * world
    )


def test_ranks_meet_in_any_order() -> None:
    ends = tcp_mesh(4)
    with threads(ends, big_total) as start:
        futures = []
        for rank in (3, 1, 0, 2):
            futures += start(rank)
            time.sleep(0.05)
        assert all(future.result(10) for future in futures)


def test_only_loopback_is_bound_on_ports_that_the_kernel_picks() -> None:
    ends = tcp_mesh(5) + tcp_mesh(5)
    names = [end.listener.getsockname() for end in ends]
    assert {host for host, _ in names} == {"127.0.0.1"}
    assert len({port for _, port in names}) == 10
    for end in ends:
        end.close()


def test_descriptors_are_counted_before_any_is_opened() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        with pytest.raises(OSError, match=r"a world of 40 needs .* but the limit is 100; raise it"):
            tcp_mesh(40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def looks_around(comm: Comm, ports: list[int]) -> tuple[list[bool], list[str], list[str]]:
    """Whether a port is still open; who is connected; where a rank's secrets might be seen."""
    comm.barrier()
    closed = []
    for port in ports:
        with socket.socket() as sock:
            closed.append(sock.connect_ex(("127.0.0.1", port)) != 0)
    links = [link._socket for link in comm._port._links if link]
    assert all(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for link in links)
    hosts = [name[0] for link in links for name in (link.getsockname(), link.getpeername())]
    seen = [Path(f"/proc/self/{what}").read_bytes().hex() for what in ("environ", "cmdline")]
    comm.barrier()
    return closed, hosts, seen


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_no_port_stays_open_and_no_token_shows(method: str) -> None:
    ends = tcp_mesh(3)
    token = ends[0].token
    assert repr(token) not in repr(ends)
    ranks = spawn(looks_around, 3, ends[0].ports, mesh=lambda world: ends, method=method)
    for closed, hosts, seen in ranks:
        assert all(closed)
        assert hosts == ["127.0.0.1"] * 4
        for text in seen:
            assert token.hex() not in text and token.hex().encode().hex() not in text


# -- strangers -------------------------------------------------------------------------------------


def scans(sock: socket.socket) -> None:
    sock.close()


def resets(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def speaks_http(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a scanner of ports\r\n\r\n" * 2)


def sends_garbage(sock: socket.socket) -> None:
    with suppress(ConnectionError):
        sock.sendall(os.urandom(10**6))


def sends_a_pickle(sock: socket.socket) -> None:
    sock.sendall(b"cos\nabort\n(tR." * 20)


def has_another_token(sock: socket.socket) -> None:
    hello(sock, os.urandom(32))


def has_the_empty_token(sock: socket.socket) -> None:
    hello(sock, b"")


def hangs_up_after_half(sock: socket.socket) -> None:
    sock.sendall(b"tllm" + b"\0" * 20)
    sock.shutdown(socket.SHUT_WR)


INSTANT = [
    scans,
    resets,
    speaks_http,
    sends_garbage,
    sends_a_pickle,
    has_another_token,
    has_the_empty_token,
    hangs_up_after_half,
]


@pytest.mark.parametrize("attack", INSTANT)
def test_a_stranger_is_dropped_at_once_and_the_job_succeeds(attack) -> None:
    ends = tcp_mesh(3)
    with threads(ends) as start:
        early = start(0, 1)
        for rank in (0, 1):
            sock = call(ends[0], rank)
            attack(sock)
            assert sock.fileno() == -1 or is_dropped(sock), "while rank 2 is not there yet"
        assert not any(future.done() for future in early)
        for future in early + start(2):
            assert future.result(SOON) == 6


def says_nothing(sock: socket.socket) -> None:
    pass


def drips(sock: socket.socket) -> None:
    """A byte of what may become a handshake, again and again."""

    def drip() -> None:
        with suppress(OSError):
            while True:
                sock.sendall(b"t")
                time.sleep(0.05)

    threading.Thread(target=drip).start()


@pytest.mark.parametrize("attack", [says_nothing, drips])
def test_who_takes_too_long_is_dropped(attack, monkeypatch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE", 0.3)
    ends = tcp_mesh(2)
    with threads(ends) as start:
        early = start(0)
        sock = call(ends[0])
        began = time.monotonic()
        attack(sock)
        assert is_dropped(sock, within=0.3 + SOON)
        assert time.monotonic() - began > 0.25
        assert [future.result(SOON) for future in early + start(1)] == [3, 3]


def test_the_silent_delay_nobody(monkeypatch) -> None:
    """There are more of them than a rank listens to, and all were there before its peers."""
    monkeypatch.setattr(tcp, "HANDSHAKE", 60.0)
    ends = tcp_mesh(4)
    guests = [call(ends[0], rank) for rank in (0, 2) for _ in range(tcp.STRANGERS + 30)]
    with threads(ends) as start:
        early = start(0, 1, 2)
        assert is_dropped(guests[0]), "a rank does not hold any number of them"
        assert [future.result(SOON) for future in early + start(3)] == [10] * 4
    for guest in guests:
        guest.close()


def besieged(ends: list[TcpEnd], over: threading.Event) -> None:
    """All sorts of strangers at all ports, as long as there are ports."""
    attacks = [*INSTANT, says_nothing]
    guests = []
    while not over.is_set():
        for number, attack in enumerate(attacks):
            with suppress(OSError):
                guests.append(call(ends[0], number % len(ends)))
                attack(guests[-1])
    for guest in guests:
        guest.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_run_under_siege(method: str) -> None:
    over = threading.Event()

    def mesh(world: int) -> list[TcpEnd]:
        ends = tcp_mesh(world)
        threading.Thread(target=besieged, args=(ends, over)).start()
        return ends

    try:
        assert spawn(big_total, 3, mesh=mesh, method=method) == [True] * 3
    finally:
        over.set()


# -- proofs ----------------------------------------------------------------------------------------


class Relay:
    """A port whose connections lead on to a rank's, byte by byte, and what came by."""

    def __init__(self, end: TcpEnd, rank: int) -> None:
        self.there = end.ports[rank]
        self.listener = socket.create_server(("127.0.0.1", 0))
        end.ports[rank] = self.listener.getsockname()[1]  # the ends of a mesh share the list
        self.up, self.down = bytearray(), bytearray()
        self.sockets = [self.listener]
        threading.Thread(target=self.serve).start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.there))
                self.sockets += [near, far]
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self.pump, args=(near, far, self.up)).start()
                threading.Thread(target=self.pump, args=(far, near, self.down)).start()

    def pump(self, source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with suppress(OSError):
            while some := source.recv(1000):
                for byte in some:
                    target.sendall(bytes([byte]))
                    seen.append(byte)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self.sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_one_byte_at_a_time_gives_the_same_bits() -> None:
    ends = tcp_mesh(3)
    relay = Relay(ends[0], 0)
    with threads(ends, lambda comm: big_total(comm, 1000)) as start:
        assert [future.result(20) for future in start(0, 1, 2)] == [True] * 3
    assert len(relay.up) > 2 * 4000, "both of the others came by it"
    relay.close()


def test_a_recorded_handshake_does_not_serve_again() -> None:
    """Neither what rank 1 said to rank 0, nor its beginning with the proof of another."""
    ends = tcp_mesh(3)
    relay = Relay(ends[0], 0)
    with threads(ends) as start:
        futures = start(0, 1)
        deadline = time.monotonic() + SOON
        while len(relay.down) < CHALLENGE + PROOF and time.monotonic() < deadline:
            time.sleep(0.01)
        for record in (relay.up[: HELLO + PROOF], relay.up[:HELLO] + relay.down[-PROOF:]):
            sock = socket.create_connection(("127.0.0.1", relay.there), timeout=SOON)
            sock.sendall(record)
            assert is_dropped(sock)
        assert [future.result(SOON) for future in futures + start(2)] == [6] * 3
    relay.close()


def test_a_proof_serves_neither_another_rank_nor_the_other_side() -> None:
    ends = tcp_mesh(4)
    with threads(ends) as start:
        futures = start(0, 1, 2)
        for lie in ({"side": b"welcomes"}, {"side": b""}):
            sock = call(ends[0])
            hello(sock, ends[0].token, world=4, rank=3, **lie)
            assert is_dropped(sock)
        sock = call(ends[0])
        nonce = read(sock, CHALLENGE)[8:]
        for_1, for_0 = (
            struct.pack("<4sB3xIII32s", b"tllm", 1, 4, 3, to, b"n" * 32) for to in (1, 0)
        )
        sock.sendall(for_0 + hmac_sha256(ends[0].token, b"connects" + nonce + for_1))
        assert is_dropped(sock)
        assert [future.result(SOON) for future in futures + start(3)] == [10] * 4


@pytest.mark.parametrize("answer", ["reflected", "zeros", "half"])
def test_who_took_a_ranks_port_is_not_believed(answer: str) -> None:
    """Rank 1 connects to an impostor, who sends its own proof back to it, or what else he has."""
    ends = tcp_mesh(2, timeout=0.2)
    impostor = socket.create_server(("127.0.0.1", 0))
    ends[0].ports[0] = impostor.getsockname()[1]
    came = []

    def pose() -> None:
        with suppress(OSError):
            while True:
                sock, _ = impostor.accept()
                sock.sendall(struct.pack("<4sB3x32s", b"tllm", 1, os.urandom(32)))
                said = read(sock, HELLO + PROOF)
                proof = {"reflected": said[HELLO:], "zeros": bytes(PROOF), "half": b"t"}[answer]
                sock.sendall(proof)
                came.append(sock)

    thread = threading.Thread(target=pose)
    thread.start()
    with threads(ends) as start:
        with pytest.raises(CommTimeout, match=r"missing ranks \[0\]"):
            start(1)[0].result(SOON)
        assert len(came) > 1 or answer == "half", "it tried again"
    impostor.shutdown(socket.SHUT_RDWR)
    thread.join()
    for sock in (impostor, *came):
        sock.close()


def test_a_rank_that_was_dropped_tries_again() -> None:
    ends = tcp_mesh(2)
    busy = socket.create_server(("127.0.0.1", 0))
    real, ends[0].ports[0] = ends[0].ports[0], busy.getsockname()[1]
    with threads(ends) as start:
        futures = start(0, 1)
        for _ in range(2):
            sock, _ = busy.accept()
            sock.close()
        ends[0].ports[0] = real
        assert [future.result(SOON) for future in futures] == [3, 3]
    busy.close()


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ({"version": 2}, "it speaks version 2, rank 0 version 1"),
        ({"world": 4}, "its world is 4, rank 0's is 3"),
        ({"to": 1}, "it wants rank 1, and this is rank 0"),
        ({"rank": 0}, "to rank 0 connect ranks 1 to 2"),
        ({"rank": 3}, "to rank 0 connect ranks 1 to 2"),
        ({}, "there are two of it, on ports "),
    ],
)
def test_who_knows_the_token_but_has_no_place_here_is_an_error(lie: dict, says: str) -> None:
    ends = tcp_mesh(3)
    with threads(ends) as start:
        (future,) = start(0)
        socks = [call(ends[0]) for _ in range(1 if lie else 2)]
        for sock in socks:
            hello(sock, ends[0].token, **lie)
        with pytest.raises(DesyncError) as caught:
            future.result(SOON)
        rank = lie.get("rank", 2)
        assert str(caught.value).startswith(f"rank 0 was connected to by rank {rank}, but {says}")
        assert (caught.value.rank, caught.value.op) == (rank, "rendezvous")
        for sock in socks:
            sock.close()


# -- ranks that do not come, or go -----------------------------------------------------------------


def test_after_the_deadline_the_missing_are_named() -> None:
    ends = tcp_mesh(4, timeout=0.3)
    with threads(ends) as start:
        began = time.monotonic()
        futures = start(0, 2)
        for future in futures:
            with pytest.raises(CommTimeout, match=r"waited 0.3 s .* missing ranks \[1, 3\]"):
                future.result(SOON)
        assert time.monotonic() - began > 0.3


def test_a_rank_that_is_gone_is_a_lost_peer() -> None:
    ends = tcp_mesh(2)
    ends[0].close()
    with threads(ends) as start:
        with pytest.raises(PeerLost, match="rank 1 lost rank 0 before they met") as caught:
            start(1)[0].result(SOON)
        assert caught.value.rank == 0


class Falters:
    """Rank 1's end of a mesh: something happens to it when it opens."""

    def __init__(self, end: TcpEnd, how: str) -> None:
        self.end, self.how = end, how

    def open(self, board: Board) -> Comm:
        if self.how == "raises":
            raise ValueError("not today")
        if "half" in self.how:  # it has said half of what it has to
            sock = call(self.end, 0)
            sock.send(struct.pack("<4sB3xIII", b"tllm", 1, 3, 1, 0))
        if "stops" in self.how:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.how == "has another token":
            self.end.token = os.urandom(32)
            return self.end.open(board)
        os._exit(9)

    def close(self) -> None:
        self.end.close()


def faltering(how: str, **options):
    def mesh(world: int) -> list:
        ends: list = tcp_mesh(world, **options)
        ends[1] = Falters(ends[1], how)
        return ends

    return mesh


@pytest.mark.parametrize(
    ("how", "method"),
    [("dies", "spawn"), ("dies", "forkserver"), ("dies after half", "forkserver")],
)
def test_a_rank_that_dies_before_they_meet_is_named(how: str, method: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 exited with code 9 before") as caught:
        spawn(total, 3, mesh=faltering(how), method=method)
    assert (caught.value.rank, caught.value.exitcode) == (1, 9)
    assert time.monotonic() - began < 5


def test_a_rank_that_raises_before_they_meet_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 raised ValueError: not today") as caught:
        spawn(total, 3, mesh=faltering("raises"), method="forkserver")
    assert caught.value.rank == 1


def test_a_rank_that_stops_before_they_meet_is_named() -> None:
    mesh = faltering("stops after half")
    with pytest.raises(CommTimeout) as caught:
        spawn(total, 3, mesh=mesh, method="forkserver", timeout=1.5)
    assert caught.value.rank == 1
    assert "rank 1 still starting, and others wait" in str(caught.value)
    assert "rank 2 is in barrier #0, waiting for a message from rank 1" in str(caught.value)


def test_a_rank_of_another_run_does_not_get_in() -> None:
    mesh = faltering("has another token", timeout=0.5)
    with pytest.raises(CommTimeout, match=r"missing ranks (\[1\]|\[0, 2\])"):
        spawn(total, 3, mesh=mesh, method="forkserver", timeout=10)


# -- what goes wrong later -------------------------------------------------------------------------


def breaks_off(comm: Comm, how: str) -> str:
    """Rank 0 sends a header and 100 bytes of 800, and then nothing more."""
    comm.timeout = 0.4
    x = np.arange(200.0)
    if comm.rank == 0:
        sock = comm._port._links[1]._socket
        with comm._port.operation("all_reduce", x, redop="sum"):
            sock.sendall(comm._port.call.head + bytes(100))
            time.sleep(0.2 if how == "reset" else 0.8)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        return ""
    with pytest.raises((PeerLost, CommTimeout)) as caught:
        comm.all_reduce(x)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["reset", "silence"])
def test_a_message_that_breaks_off(how: str) -> None:
    ends = tcp_mesh(2)
    with threads(ends, lambda comm: breaks_off(comm, how)) as start:
        _, said = (future.result(SOON) for future in start(0, 1))
    says = {
        "reset": "PeerLost: rank 1 lost rank 0 in all_reduce #1 (float64[200], sum): Connection"
        " reset by peer after 660 of 1,360 bytes",
        "silence": "CommTimeout: rank 1 is in all_reduce #1 (float64[200], sum), waiting for a"
        " message from rank 0, longer than comm.timeout, 0.4 s: rank 0 not done, and others wait",
    }
    assert said == says[how]


def claims_too_much(comm: Comm) -> str:
    if comm.rank == 0:
        head = frame.Frame("send", 0, np.dtype("u1"), (1 << 62,), root=1, nth=1).pack()
        comm._port._links[1]._socket.sendall(head)
        return ""
    with pytest.raises(FrameError, match="claims 4,611,686,018,427,387,904 bytes") as caught:
        comm.recv(0)
    return str(caught.value)


def test_a_header_that_claims_too_much_is_refused() -> None:
    ends = tcp_mesh(2)
    with threads(ends, claims_too_much) as start:
        assert all(future.result(SOON) is not None for future in start(0, 1))
