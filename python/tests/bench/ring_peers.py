"""all_reduce beside the least that a ring can be, in turn and in one run.

    python python/tests/bench/ring_peers.py [--mesh pipe] [--world 2 4] [--rounds 9]

Peers, all of them even/odd rings, the bare ones over the very sockets that the Comm uses:

    bare+add   sendmsg and recv_into of the raw chunks, numpy adds; no header, no check, no count
    bare       the same without the adds: what moving the bytes alone takes
    pickle     Connection.send(array) and recv() over pipes of its own, as a first version has it

Prints the median time of one all_reduce (``out=``) and the ratios: below 1 we are faster.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tinyllm.dist import tcp_mesh
from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh, spawn
from tinyllm.dist.port import Ends

MESHES = {"pipe": pipe_mesh, "tcp": tcp_mesh}
SIZES = [8, 64, 1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 32 << 20]


class BareRing:
    """The ring and nothing else."""

    def __init__(self, comm: Comm, n: int, adds: bool) -> None:
        self.rank, self.world, self.adds = comm.rank, comm.world, adds
        left, right = (comm.rank - 1) % comm.world, (comm.rank + 1) % comm.world
        self.left = comm._port._links[left]._socket
        self.right = comm._port._links[right]._socket
        self.bounds = chunk_bounds(n, comm.world)
        self.scratch = np.empty(self.bounds[0][1])

    def exchange(self, outgoing, into):
        if self.rank % 2 == 0:
            self.send(outgoing)
            self.recv(into)
        else:
            self.recv(into)
            self.send(outgoing)

    def send(self, x):
        if x.nbytes:
            self.right.sendall(x)

    def recv(self, x):
        view, got = memoryview(x).cast("B") if x.size else b"", 0
        while got < len(view):
            try:
                got += self.left.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue

    def all_reduce(self, x, out):
        rank, world = self.rank, self.world
        mine = [x[a:b] for a, b in self.bounds]
        total = [out[a:b] for a, b in self.bounds]
        for step in range(world - 1):
            send_chunk, recv_chunk = (rank - step - 1) % world, (rank - step - 2) % world
            into = self.scratch[: total[recv_chunk].size] if self.adds else total[recv_chunk]
            self.exchange(total[send_chunk] if step else mine[send_chunk], into)
            if self.adds:
                np.add(into, mine[recv_chunk], out=total[recv_chunk])
        for step in range(world - 1):
            self.exchange(total[(rank - step) % world], total[(rank - step - 1) % world])
        return out


class PickleRing(BareRing):
    """The same over Connection.send(array)."""

    def __init__(self, comm: Comm, n: int) -> None:
        super().__init__(comm, n, adds=True)
        self.left = comm.plain[(comm.rank - 1) % comm.world]
        self.right = comm.plain[(comm.rank + 1) % comm.world]

    def send(self, x):
        self.right.send(x)

    def recv(self, x):
        x[:] = self.left.recv()


@dataclass
class TwoMeshes:
    """The Comm's own channels, and as many plain pipes for the ring that pickles."""

    ours: Any  # its Ends
    plain: Ends

    @property
    def rank(self) -> int:
        return self.plain.rank

    def open(self, board):
        comm = self.ours.open(board)
        comm.plain = self.plain.channels
        return comm

    def close(self):
        self.ours.close()
        self.plain.close()


def two_meshes(world: int, mesh) -> list[TwoMeshes]:
    return list(map(TwoMeshes, mesh(world), pipe_mesh(world)))


def measure(comm: Comm, size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per all_reduce, by peer and round; peers take turns within each round."""
    n = size // 8
    x, out = np.arange(n) + 100.0 * comm.rank, np.empty(n)
    expected = np.arange(n) * comm.world + 100.0 * sum(range(comm.world))
    repeat = max(2, min(400, (16 << 20) // size))
    peers = {
        "ours": lambda x, out: comm.all_reduce(x, out=out),
        "bare+add": BareRing(comm, n, adds=True).all_reduce,
        "bare": BareRing(comm, n, adds=False).all_reduce,
        "pickle": PickleRing(comm, n).all_reduce,
    }
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, all_reduce in peers.items():
            out[:] = 0
            comm.barrier()
            start = time.perf_counter()
            for _ in range(repeat):
                all_reduce(x, out)
            seconds[name].append((time.perf_counter() - start) / repeat)
            assert name == "bare" or np.array_equal(out, expected), name
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mesh", choices=MESHES, default="pipe")
    options = parser.parse_args()
    mesh = partial(two_meshes, mesh=MESHES[options.mesh])
    print(f"{'world':>5} {'bytes':>11} {'ours µs':>10}  vs bare+add   vs bare   pickle/ours")
    for world in options.world:
        for size in SIZES:
            ranks = spawn(measure, world, size, options.rounds, timeout=None, mesh=mesh)
            medians = {
                name: statistics.median(map(max, zip(*(rank[name] for rank in ranks), strict=True)))
                for name in ranks[0]
            }
            ours = medians["ours"]
            print(
                f"{world:>5} {size:>11,} {ours * 1e6:>10,.1f} {ours / medians['bare+add']:>12.2f}"
                f" {ours / medians['bare']:>9.2f} {medians['pickle'] / ours:>13.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
