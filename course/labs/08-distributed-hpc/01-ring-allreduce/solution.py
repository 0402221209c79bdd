"""Ring all-reduce over real sockets: N processes, each joined by TCP to its two neighbours.

    python3 solution.py --world 8 --size 1000000

    0 ---> 1    Every rank has a vector, cut into N chunks.  In each step it sends one chunk to the
    ^      |    right while another one arrives from the left:
    |      v      reduce_scatter  N - 1 steps: what arrives is added to the rank's own chunk
    3 <--- 2      all_gather      N - 1 steps: what arrives takes that chunk's place

In the order of reading: what a rank does; its sockets and their counters; the parent, which starts
the ranks, checks their sums and ends them.
"""

import argparse
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from array import array
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from operator import add
from typing import NamedTuple

HOST = "127.0.0.1"  # loopback: nobody from outside can join the ring
DOUBLE = 8  # bytes
HEADER = struct.Struct("<Q")  # ahead of each chunk: how many payload bytes follow
GRACE = 0.5  # seconds for others to complain too, so that the blame falls on the right rank

# -- one rank --------------------------------------------------------------------------------------


def worker(rank, world, size, listener, right_port, timeout):
    """Join the ring and make all RUNS; return each one's total, and the payload bytes it sent."""
    ring = connect(rank, world, listener, right_port, timeout)
    results = []
    with ring.left.sock, ring.right.sock:
        for all_reduce, shard in RUNS:
            before = ring.right.bytes_sent
            total = all_reduce(ring, shard(rank, size))
            results.append((total, ring.right.bytes_sent - before))
    return results


def same(rank, size):
    """The lab's data: r + 1 in every entry of rank r, so that each adds up to 1 + ... + N."""
    return array("d", [rank + 1]) * size


def varied(rank, size):
    """Entry i of rank r is r² + (r + 1) i: here a chunk that lands in the wrong place shows."""
    start, stride = rank * rank, rank + 1
    return array("d", range(start, start + stride * size, stride))


def ring_all_reduce(ring, vector):
    """Make ``vector`` the sum of all ranks' vectors: 2 (N - 1) steps, about 2 (N - 1)/N · V bytes.

    V is the size of a vector in bytes; all bytes here are those that one rank sends.
    """
    reduce_scatter(ring, vector)
    all_gather(ring, vector)
    return vector


def reduce_scatter(ring, vector):
    """Sum up chunk (rank + 1) mod N over all ranks, and leave the other chunks half done."""
    rank, world, chunks = ring.rank, ring.world, chunk_slices(len(vector), ring.world)
    for step in range(world - 1):
        send_chunk = chunks[(rank - step) % world]
        recv_chunk = chunks[(rank - step - 1) % world]  # the left neighbour's send_chunk
        mine = vector[recv_chunk]
        arrived = exchange(ring, vector[send_chunk], len(mine))
        vector[recv_chunk] = array("d", map(add, mine, arrived))


def all_gather(ring, vector):
    """Pass on the finished chunks, first one's own, (rank + 1) mod N, until every rank has all."""
    rank, world, chunks = ring.rank, ring.world, chunk_slices(len(vector), ring.world)
    for step in range(world - 1):
        send_chunk = chunks[(rank + 1 - step) % world]
        recv_chunk = chunks[(rank - step) % world]
        vector[recv_chunk] = exchange(ring, vector[send_chunk], len(vector[recv_chunk]))


def naive_all_reduce(ring, vector):
    """Gather the whole vectors of all ranks, then add them up: N - 1 steps, (N - 1) V bytes."""
    rank, world, vectors = ring.rank, ring.world, {ring.rank: vector}
    for step in range(world - 1):
        outgoing = vectors[(rank - step) % world]
        vectors[(rank - step - 1) % world] = exchange(ring, outgoing, len(vector))
    return sum_of(vectors[rank] for rank in range(world))


RUNS = [(ring_all_reduce, same), (ring_all_reduce, varied), (naive_all_reduce, same)]


def sum_of(vectors):
    """Add up vectors entry by entry, without a ring."""
    total = None
    for vector in vectors:
        total = vector if total is None else array("d", map(add, total, vector))
    return total


def chunk_slices(size, world):
    """Where each chunk lies; the first size mod N have an entry more, and some may be empty."""
    entries, larger = divmod(size, world)
    edges = [chunk * entries + min(chunk, larger) for chunk in range(world + 1)]
    return [slice(edges[chunk], edges[chunk + 1]) for chunk in range(world)]


def exchange(ring, outgoing, entries):
    """Send ``outgoing`` to the right and receive so many entries from the left, at the same time.

    If all ranks sent first and then received, a chunk that is too large for the sockets' buffers
    would leave all of them sending and none receiving.  So the sending has a thread.
    """
    failures = []

    def send():
        try:
            ring.right.send_chunk(outgoing)
        except Exception as error:  # it would end unseen, with its thread
            failures.append(error)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    arrived = ring.left.recv_chunk(entries)
    sender.join()
    if failures:
        raise failures[0]
    return arrived


# -- sockets ---------------------------------------------------------------------------------------


class NeighbourLost(Exception):
    """``NeighbourLost(rank, why)``: that rank is gone or silent, as one of its neighbours sees."""


@contextmanager
def blaming(rank):
    """Let what goes wrong with a socket name the rank at its other end."""
    try:
        yield
    except OSError as error:  # a timeout is one too
        raise NeighbourLost(rank, error.strerror or str(error)) from None


class Link:
    """A connection to the rank ``peer``; a chunk travels as a header and its doubles.

    ``bytes_sent`` counts payload, as the socket takes it: the bytes of the doubles, without the
    headers (8 bytes a chunk) and without what TCP and IP add below.
    """

    def __init__(self, sock, peer):
        self.sock, self.peer, self.bytes_sent = sock, peer, 0

    def send_chunk(self, chunk):
        """Return when the socket has taken all of it."""
        payload = memoryview(little_endian(chunk).tobytes())
        with blaming(self.peer):
            self.sock.sendall(HEADER.pack(len(payload)))
            while payload:
                taken = self.sock.send(payload)
                self.bytes_sent += taken
                payload = payload[taken:]

    def recv_chunk(self, entries):
        """Wait for the next chunk, which must have so many entries."""
        with blaming(self.peer):
            (length,) = HEADER.unpack(self._recv_exactly(HEADER.size))
            if length != entries * DOUBLE:
                raise ConnectionError(f"sent {length} bytes where {entries * DOUBLE} were due")
            return little_endian(array("d", self._recv_exactly(length)))

    def _recv_exactly(self, length):
        received = bytearray(length)
        room = memoryview(received)
        while room:  # TCP is a stream: a recv may bring less than a send took
            count = self.sock.recv_into(room)
            if count == 0:
                raise ConnectionError("closed the connection")
            room = room[count:]
        return bytes(received)


def little_endian(chunk):
    """Return the chunk in the byte order of the wire, or one from the wire in this machine's."""
    if sys.byteorder == "big":
        chunk = chunk[:]
        chunk.byteswap()
    return chunk


class Ring(NamedTuple):
    """A rank's place in the ring."""

    rank: int
    world: int
    left: Link
    right: Link


def connect(rank, world, listener, right_port, timeout):
    """Call the right neighbour, then answer the left one; the kernel takes calls meanwhile."""
    left, right = (rank - 1) % world, (rank + 1) % world
    with blaming(right):
        to_right = socket.create_connection((HOST, right_port), timeout)
        to_right.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a header need not wait
    with listener, blaming(left):
        listener.settimeout(timeout)
        from_left, _ = listener.accept()
        from_left.settimeout(timeout)
    return Ring(rank, world, Link(from_left, left), Link(to_right, right))


# -- the parent ------------------------------------------------------------------------------------


class RankFailed(Exception):
    """The message names the rank that spoilt the run."""


def run(world, size, timeout):
    """Start ``world`` processes, return their workers' results by rank, and leave none behind."""
    context = multiprocessing.get_context("spawn")
    # All listen before the first one calls; 0 lets the kernel choose a port that is free.
    listeners = [socket.create_server((HOST, 0)) for _ in range(world)]
    ports = [listener.getsockname()[1] for listener in listeners]
    processes, pipes = [], []
    try:
        # The ranks inherit a blocked SIGINT: Ctrl-C is for the parent alone, which then ends them.
        resource_tracker.ensure_running()  # spawn starts it first, and it would undo the next line
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        for rank, listener in enumerate(listeners):
            pipe, end = context.Pipe()
            place = rank, world, size, listener, ports[(rank + 1) % world], timeout
            process = context.Process(target=report_worker, args=(end, *place))
            try:
                process.start()
            except OSError as error:
                raise RankFailed(f"rank {rank} could not start: {error.strerror}") from None
            processes.append(process)
            pipes.append(pipe)
            end.close()  # the rank holds it alone now: its death is our end of file
            listener.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        reports = collect(processes, pipes, timeout)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        for process in processes:
            process.kill()
            process.join()
        for listener in listeners:  # those whose ranks did not start
            listener.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if failure := who_failed(reports, world):
        raise RankFailed(failure)
    return [reports[rank][1] for rank in range(world)]


def report_worker(parent, rank, *place):
    """Run ``worker`` in a process of its own, and tell the parent how it ended."""
    try:
        report = "done", worker(rank, *place)
    except NeighbourLost as lost:
        report = "lost", lost.args
    except BaseException:  # sys.exit() amid a collective is a failure as well
        report = "raised", traceback.format_exc()
    with suppress(OSError):  # the parent may be gone
        parent.send(report)


def collect(processes, pipes, timeout):
    """The ranks' reports as they come, until all are here or the rest need not be waited for."""
    reports, kinds = {}, set()
    while len(reports) < len(pipes) and not kinds & {"raised", "died"}:
        # Ranks go in step: once one has reported, the others must come soon.
        patience = GRACE if "lost" in kinds else timeout if reports else None
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in reports], patience)
        if not ready:
            break
        for rank in map(pipes.index, ready):
            try:
                reports[rank] = pipes[rank].recv()
            except (EOFError, OSError):
                processes[rank].join()
                reports[rank] = "died", processes[rank].exitcode
            kinds.add(reports[rank][0])
    return reports


def who_failed(reports, world):
    """Name the rank that is to blame and say why; None if all are done."""
    for rank, (kind, detail) in reports.items():
        if kind == "died":
            how = signal.strsignal(-detail) if detail < 0 else f"exit code {detail}"
            return f"rank {rank} died: {how}"
        if kind == "raised":
            return f"rank {rank} raised\n{detail}"
    # A rank that leaves over a lost neighbour is in turn lost to its other one, and so on along the
    # ring; the one with whom that began blames nobody.
    lost = {rank: detail for rank, (kind, detail) in reports.items() if kind == "lost"}
    for rank, (peer, why) in lost.items():
        if peer not in lost:
            return f"rank {peer} failed, says rank {rank}: {why}"
    if lost:
        first, *_ = lost.values()
        return f"ranks {', '.join(map(str, sorted(lost)))} wait for each other: {first[1]}"
    missing = [rank for rank in range(world) if rank not in reports]
    return f"rank {missing[0]} failed: no result" if missing else None


def first_fault(results, size):
    """Name the first entry that differs from the reference sum; None if every rank is right."""
    for number, (all_reduce, shard) in enumerate(RUNS):
        reference = sum_of(shard(rank, size) for rank in range(len(results)))
        for rank, result in enumerate(results):
            total, _ = result[number]
            if total != reference:
                i = next(i for i in range(size) if total[i] != reference[i])
                has = f"rank {rank} has {total[i]:.0f} at {i}, not {reference[i]:.0f}"
                return f"{all_reduce.__name__}, {shard.__name__}: {has}"
    return None


def show(results, size):
    """Print what was measured; return whether the sums are right."""
    world = len(results)
    ring, _, naive = ([moved for _, moved in one_run] for one_run in zip(*results, strict=True))
    value = results[0][0][0][0]
    outcome = f"PASS (every rank's result == sum 1..{world} = {value:.0f})"
    if fault := first_fault(results, size):
        outcome = f"FAIL ({fault})"
    bound = 2 * (world - 1) / world * size * DOUBLE
    ratio, gain = max(ring) / bound, max(naive) / max(ring)
    print(f"ring all-reduce: world={world}, vector={size} doubles")
    print(f"  correctness: {outcome}")
    print(f"  bytes/rank moved : ring={spread(ring)}   naive_allgather={spread(naive)}")
    print(f"  per-rank volume vs 2(N-1)/N*V bound: {ratio:.2f}x  (1.00 = bandwidth-optimal)")
    print(f"  ring moves {gain:.1f}x fewer bytes than naive all-gather")
    return fault is None


def spread(counts):
    """One number, or from least to most where chunks are uneven."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def main():
    """Return the exit code: 1 for wrong sums or a failed rank, 2 for arguments, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(description="Ring all-reduce over TCP on this machine.")
    parser.add_argument("--world", type=int, default=4, help="ranks (4)")
    parser.add_argument("--size", type=int, default=80_000, help="doubles per rank (80000)")
    parser.add_argument("--timeout", type=int, default=30, help="seconds to wait for a rank (30)")
    args = parser.parse_args()
    for name, least, most in ("world", 2, 1000), ("size", 1, 10**12), ("timeout", 1, 10**6):
        if not least <= (value := getattr(args, name)) <= most:
            parser.error(f"--{name} must be from {least} to {most}, got {value}")
    # The naive way has all vectors on all ranks; and the parent collects the results of all RUNS.
    needed = args.world * (args.world + 8) * args.size * DOUBLE
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        parser.error(f"--size {args.size} takes {needed:.0e} bytes, the machine has {memory:.0e}")
    try:
        return 0 if show(run(args.world, args.size, args.timeout), args.size) else 1
    except KeyboardInterrupt:
        print("solution.py: interrupted", file=sys.stderr)
        return 130
    except (RankFailed, OSError, MemoryError) as error:
        print(f"solution.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
