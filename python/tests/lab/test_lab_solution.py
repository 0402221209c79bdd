"""The lab's solution.py as a learner runs it, and its parts over real sockets.

The program runs isolated (``-I``) and in an empty environment: it must need nothing but Python.
"""

from __future__ import annotations

import errno
import importlib.util
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

LAB = Path(__file__).parents[3] / "course/labs/08-distributed-hpc/01-ring-allreduce"
PROGRAM = LAB / "solution.py"
LONG = ("--world", "4", "--size", "2000000")  # some seconds: it is never awaited

BLOCK = """\
ring all-reduce: world=8, vector=80000 doubles
  correctness: PASS (every rank's result == sum 1..8 = 36)
  bytes/rank moved : ring=1,120,000   naive_allgather=4,480,000
  per-rank volume vs 2(N-1)/N*V bound: 1.00x  (1.00 = bandwidth-optimal)
  ring moves 4.0x fewer bytes than naive all-gather
"""


# -- the program -----------------------------------------------------------------------------------


class Program:
    """A run in a session of its own, so that all its processes can be found."""

    def __init__(self, *args, program=PROGRAM, flags=()):
        self.process = subprocess.Popen(
            [sys.executable, "-I", *flags, str(program), *args],
            env={},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def outcome(self):
        """Exit code, stdout and stderr; and no process of it is left."""
        out, err = self.process.communicate(timeout=30)
        self.wait_until(lambda: not self.members())  # multiprocessing's tracker ends last
        return self.process.returncode, out, err

    def end(self):
        """Whatever the test came to, leave nothing of it."""
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def members(self):
        """The pids and command lines of its session that are still there."""
        table = subprocess.run(
            ["ps", "-axwwo", "pid=,pgid=,stat=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 3) for line in table.stdout.splitlines()]
        return {
            int(pid): args
            for pid, group, state, args in rows
            if int(group) == self.process.pid and state[0] != "Z"
        }

    def ranks(self, world):
        """The pids of all ranks, as soon as they have been started."""
        found = []

        def started():
            found[:] = sorted(pid for pid, args in self.members().items() if "spawn_main" in args)
            return len(found) == world

        self.wait_until(started)
        return found

    @staticmethod
    def wait_until(true, seconds=10):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def start():
    programs = []

    def begin(*args, **options):
        programs.append(Program(*args, **options))
        return programs[-1]

    yield begin
    for program in programs:
        program.end()


def broken(tmp_path, line, wrong):
    """A copy of the program in which a learner got one line wrong."""
    source = PROGRAM.read_text()
    assert source.count(line) == 1
    copy = tmp_path / "solution.py"
    copy.write_text(source.replace(line, wrong))
    return copy


def test_the_block_of_the_lab(start):
    strict = ("-W", "error")  # a socket left open would be reported on stderr
    assert start("--world", "8", flags=strict).outcome() == (0, BLOCK, "")


def test_four_ranks_are_the_default(start):
    code, out, err = start().outcome()
    assert (code, err) == (0, "")
    assert out.splitlines()[1:3] == [
        "  correctness: PASS (every rank's result == sum 1..4 = 10)",
        "  bytes/rank moved : ring=960,000   naive_allgather=1,920,000",
    ]
    assert out.endswith("\n  ring moves 2.0x fewer bytes than naive all-gather\n")


@pytest.mark.parametrize(("world", "size", "ring", "naive", "ratio", "gain"), [
    (2, 1, "8", "8", "1.00x", "1.0x"),
    (3, 10, "104 to 112", "160", "1.05x", "1.4x"),
    (5, 1001, "12,808 to 12,816", "32,032", "1.00x", "2.5x"),
    (6, 3, "32 to 48", "120", "1.20x", "2.5x"),
])  # fmt: skip
def test_sizes_that_do_not_divide(start, world, size, ring, naive, ratio, gain):
    code, out, err = start("--world", str(world), "--size", str(size)).outcome()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"ring all-reduce: world={world}, vector={size} doubles",
        f"  correctness: PASS (every rank's result == sum 1..{world} = {world * (world + 1) // 2})",
        f"  bytes/rank moved : ring={ring}   naive_allgather={naive}",
        f"  per-rank volume vs 2(N-1)/N*V bound: {ratio}  (1.00 = bandwidth-optimal)",
        f"  ring moves {gain} fewer bytes than naive all-gather",
    ]


def test_it_imports_the_standard_library_alone():
    imported = re.findall(r"^(?:import|from) (\w+)", PROGRAM.read_text(), re.M)
    assert set(imported) <= sys.stdlib_module_names


def test_a_wrong_chunk_is_found_by_the_check(start, tmp_path):
    wrong = broken(
        tmp_path, "chunks[(rank - step - 1) % world]", "chunks[(rank - step + 1) % world]"
    )
    code, out, err = start("--world", "3", "--size", "6", program=wrong).outcome()
    assert (code, err) == (1, "")
    assert "correctness: FAIL (ring_all_reduce, same: rank 0 has 5 at 0, not 6)" in out


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_run_and_is_named(start):
    program = start(*LONG)
    os.kill(program.ranks(4)[3], signal.SIGKILL)
    code, out, err = program.outcome()
    assert (code, out) == (1, "")
    killed = signal.strsignal(signal.SIGKILL)  # or, when we were quick:
    assert re.fullmatch(rf"solution\.py: rank 3 (died: {killed}|could not start: .*)\n", err)


def test_a_stopped_rank_is_found_by_the_timeout(start):
    program = start(*LONG, "--timeout", "2")  # which the others' start must not take
    os.kill(program.ranks(4)[1], signal.SIGSTOP)
    code, out, err = program.outcome()
    assert (code, out) == (1, "")
    assert re.fullmatch(r"solution\.py: rank 1 failed, says rank [02]: timed out\n", err)


def test_a_rank_that_cannot_start_is_named(lab, monkeypatch):
    def start(process):
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(lab.RankFailed, match="rank 0 could not start: no more processes"):
        lab.run(2, 1, 1)


@pytest.mark.parametrize(("leave", "words"), [
    ("sys.exit('no more')", "rank 1 raised\nTraceback"),
    ("os._exit(3)", "rank 1 died: exit code 3\n"),
])  # fmt: skip
def test_a_rank_that_leaves_amid_a_collective(start, tmp_path, leave, words):
    line = "        mine = vector[recv_chunk]\n"
    copy = broken(tmp_path, line, f"{line}        if (rank, step) == (1, 1): {leave}\n")
    code, out, err = start("--world", "3", "--size", "9", program=copy).outcome()
    assert (code, out) == (1, "")
    assert err.startswith(f"solution.py: {words}")


def test_ctrl_c_leaves_nothing(start):
    program = start(*LONG)
    for pid in program.ranks(4):
        os.kill(pid, signal.SIGINT)  # a terminal sends it to all processes: it means the parent
    time.sleep(0.1)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.outcome() == (130, "", "solution.py: interrupted\n")


def test_ranks_do_not_outlive_their_parent(start):
    program = start("--world", "3", "--size", "20000", "--timeout", "2")
    program.ranks(3)
    program.process.kill()  # a rank that is just starting says so on stderr
    assert program.outcome()[:2] == (-signal.SIGKILL, "")


# -- the parts, in this process --------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab():
    spec = importlib.util.spec_from_file_location("lab_solution", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("args", "words"), [
    (["--world", "0"], "--world must be from 2 to 1000, got 0"),
    (["--world", "-4"], "--world must be from 2 to 1000, got -4"),
    (["--world", "1"], "--world must be from 2 to 1000, got 1"),
    (["--world", "2.5"], "argument --world: invalid int value: '2.5'"),
    (["--size", "0"], "--size must be from 1 to 1000000000000, got 0"),
    (["--size", "-1"], "--size must be from 1 to 1000000000000, got -1"),
    (["--size", "1000000000000"], "--size 1000000000000 takes 4e+14 bytes, the machine has "),
    (["--timeout", "0"], "--timeout must be from 1 to 1000000, got 0"),
    (["--ranks", "4"], "unrecognized arguments: --ranks 4"),
])  # fmt: skip
def test_bad_arguments(lab, monkeypatch, capsys, args, words):
    monkeypatch.setattr(lab, "run", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr(sys, "argv", ["solution.py", *args])
    with pytest.raises(SystemExit) as left:
        lab.main()
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"solution.py: error: {words}" in err


def in_a_ring(lab, world, function, timeout=5.0):
    """What ``function(ring)`` returns on each rank; ranks are threads here, buffers are small."""
    sockets = []
    for _ in range(world):
        pair = socket.socketpair()
        for sock in pair:
            sock.settimeout(timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sockets.append(pair)
    rings = [
        lab.Ring(
            rank,
            world,
            lab.Link(sockets[rank - 1][1], (rank - 1) % world),
            lab.Link(sockets[rank][0], (rank + 1) % world),
        )
        for rank in range(world)
    ]
    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(function, rings))
    finally:
        for sock in sum(sockets, ()):
            sock.close()


def random_vectors(world, size):
    """Whole numbers: their sums are exact in any order."""
    rng = np.random.default_rng([world, size])
    return rng.integers(-1_000_000, 1_000_000, (world, size)).astype(np.float64)


SHAPES = [(2, 1), (2, 7), (3, 2), (3, 10), (4, 4), (5, 3), (5, 23), (8, 37)]


@pytest.mark.parametrize(("world", "size"), SHAPES)
def test_reduce_scatter_adds_along_the_ring(lab, world, size):
    data = random_vectors(world, size)

    def reduce_scatter(ring):
        vector = array("d", data[ring.rank])
        lab.reduce_scatter(ring, vector)
        return vector, ring.right.bytes_sent

    edges = [0, *np.cumsum([len(part) for part in np.array_split(data[0], world)])]
    for rank, (vector, sent) in enumerate(in_a_ring(lab, world, reduce_scatter)):
        for chunk in range(world):
            # A chunk sets out at the rank of its own number, and each rank adds its part.
            way = [(chunk + hop) % world for hop in range((rank - chunk) % world + 1)]
            part = slice(edges[chunk], edges[chunk + 1])
            assert np.array_equal(vector[part], data[way, part].sum(axis=0)), (rank, chunk)
        owned = (rank + 1) % world
        assert sent == 8 * (size - (edges[owned + 1] - edges[owned]))


@pytest.mark.parametrize(("world", "size"), SHAPES)
@pytest.mark.parametrize("name", ["ring_all_reduce", "naive_all_reduce"])
def test_both_ways_give_the_sum_on_every_rank(lab, name, world, size):
    data = random_vectors(world, size)

    def all_reduce(ring):
        return getattr(lab, name)(ring, array("d", data[ring.rank])), ring.right.bytes_sent

    lengths = [len(part) for part in np.array_split(data[0], world)]
    for rank, (total, sent) in enumerate(in_a_ring(lab, world, all_reduce)):
        assert np.array_equal(total, data.sum(axis=0))
        skipped = lengths[(rank + 1) % world] + lengths[(rank + 2) % world]
        assert sent == 8 * ((world - 1) * size if name[0] == "n" else 2 * size - skipped)


def test_chunks_larger_than_the_buffers_do_not_deadlock(lab):
    outgoing = array("d", range(200_000))
    arrived = in_a_ring(lab, 3, lambda ring: lab.exchange(ring, outgoing, 200_000), timeout=2.0)
    assert arrived == [outgoing] * 3


def test_workers_meet_over_loopback_only(lab, monkeypatch):
    called, create = [], socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda to, limit: called.append(to) or create(to, limit)
    )
    listeners = [socket.create_server((lab.HOST, 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in listeners]
    rings = [None] * 3

    def join(rank):
        rings[rank] = lab.connect(rank, 3, listeners[rank], ports[(rank + 1) % 3], 5)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for step in ("start", "join"):
        for thread in threads:
            getattr(thread, step)()
    for rank, ring in enumerate(rings):
        right = rings[(rank + 1) % 3]
        assert (ring.right.peer, right.left.peer) == (right.rank, rank)
        assert ring.right.sock.getsockname() == right.left.sock.getpeername()
        assert ring.right.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert (ring.left.sock.gettimeout(), ring.right.sock.gettimeout()) == (5, 5)
    assert sorted(called) == sorted(("127.0.0.1", port) for port in ports)
    for sock in [*listeners, *(link.sock for ring in rings for link in ring[2:])]:
        sock.close()


@pytest.fixture
def link(lab):
    """A Link to rank 6, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.1)
    with ours, theirs:
        yield lab.Link(ours, 6), theirs


def test_a_chunk_on_the_wire(lab, link):
    ours, theirs = link
    ours.send_chunk(array("d", [1.0, -2.5, 3e300]))
    assert theirs.recv(100) == struct.pack("<Q3d", 24, 1.0, -2.5, 3e300)
    assert ours.bytes_sent == 24
    ours.send_chunk(array("d"))
    assert theirs.recv(100) == bytes(8)
    assert ours.bytes_sent == 24
    theirs.sendall(struct.pack("<Q2d", 16, 0.1, -7.0))
    assert ours.recv_chunk(2) == array("d", [0.1, -7.0])
    assert ours.bytes_sent == 24


def test_bytes_count_as_the_socket_takes_them(lab, link):
    ours, theirs = link
    with pytest.raises(lab.NeighbourLost, match="timed out"):
        ours.send_chunk(array("d", bytes(8_000_000)))
    ours.sock.close()
    arrived = sum(map(len, iter(lambda: theirs.recv(1 << 20), b"")))
    assert ours.bytes_sent == arrived - 8 < 8_000_000


def test_the_wire_has_one_byte_order(lab, monkeypatch):
    swapped = array("d", [1.5])
    swapped.byteswap()
    monkeypatch.setattr(sys, "byteorder", "big")
    chunk = array("d", [1.5])
    assert lab.little_endian(chunk) == swapped
    assert chunk[0] == 1.5


@pytest.mark.parametrize(("message", "why"), [
    (b"", "closed the connection"),
    (struct.pack("<Qd", 16, 1.0), "closed the connection"),
    (struct.pack("<Q3d", 24, 1.0, 2.0, 3.0), "sent 24 bytes where 16 were due"),
    (None, "timed out"),
])  # fmt: skip
def test_a_neighbour_that_fails_is_named(lab, link, message, why):
    ours, theirs = link
    if message is not None:
        theirs.sendall(message)
        theirs.close()
    with pytest.raises(lab.NeighbourLost) as lost:
        ours.recv_chunk(2)
    assert lost.value.args == (6, why)


def test_a_send_that_fails_is_not_lost_with_its_thread(lab):
    def exchange(ring):
        if ring.rank == 0:
            ring.right.sock.close()
        return lab.exchange(ring, array("d", [1.0]), 1)

    with pytest.raises(lab.NeighbourLost) as lost:
        in_a_ring(lab, 2, exchange, timeout=0.5)
    assert lost.value.args[0] == 1


@pytest.mark.parametrize(("reports", "words"), [
    ({0: ("done", []), 1: ("done", []), 2: ("done", [])}, None),
    ({0: ("lost", (2, "closed")), 2: ("died", 1)}, "rank 2 died: exit code 1"),
    ({0: ("lost", (2, "closed"))}, "rank 2 failed, says rank 0: closed"),
    ({0: ("lost", (2, "late")), 2: ("lost", (1, "late"))}, "rank 1 failed, says rank 2: late"),
    (
        {2: ("lost", (0, "late")), 1: ("lost", (2, "gone")), 0: ("lost", (1, "gone"))},
        "ranks 0, 1, 2 wait for each other: late",
    ),
    ({0: ("done", []), 2: ("done", [])}, "rank 1 failed: no result"),
])  # fmt: skip
def test_who_is_to_blame(lab, reports, words):
    assert lab.who_failed(reports, 3) == words


@pytest.mark.parametrize(("error", "words"), [
    (SystemExit("no more"), "SystemExit: no more"),
    (MemoryError(), "MemoryError"),
])  # fmt: skip
def test_a_rank_reports_what_it_raised(lab, monkeypatch, error, words):
    def fail(*place):
        raise error

    monkeypatch.setattr(lab, "worker", fail)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        lab.report_worker(theirs, 2)
        told, detail = ours.recv()
        assert told == "raised"
        assert words in detail
        ours.close()
        lab.report_worker(theirs, 2)  # the parent is gone: no matter


def results(lab, world, size):
    """What right workers return."""
    return [
        [
            (array("d", np.sum([shard(rank, size) for rank in range(world)], axis=0)), moved)
            for (_, shard), moved in zip(lab.RUNS, (10 + rank, 99, 30), strict=True)
        ]
        for rank in range(world)
    ]


def test_the_page_shows_what_the_program_prints():
    page = (LAB / "README.md").read_text()
    assert f"$ python3 solution.py --world 8\n{BLOCK}" in page.replace("\n    ", "\n")
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (LAB / link).exists(), link


def test_every_entry_of_every_run_is_checked(lab):
    assert lab.first_fault(results(lab, 3, 5), 5) is None
    for number, run in enumerate(("ring_all_reduce, same", "ring_all_reduce, varied", "naive_")):
        for rank in range(3):
            for index in (0, 4):
                wrong = results(lab, 3, 5)
                wrong[rank][number][0][index] += 1
                fault = lab.first_fault(wrong, 5)
                assert fault.startswith(run)
                assert f"rank {rank} has" in fault
                assert f" at {index}, not " in fault


def test_the_figures_are_those_of_the_ranks(lab, capsys):
    assert lab.show(results(lab, 3, 5), 5)
    assert "ring=10 to 12   naive_allgather=30\n" in capsys.readouterr().out
    wrong = results(lab, 3, 5)
    wrong[2][2][0][3] = 0
    assert not lab.show(wrong, 5)
    assert "FAIL (naive_all_reduce, same: rank 2 has 0 at 3, not 6)" in capsys.readouterr().out
