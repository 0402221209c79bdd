"""Collectives over processes, with multiprocessing and numpy and nothing else.

Every pair of ranks shares a duplex pipe. The ring uses two of them per rank:

    ... -> left -> rank -> right -> ...

and `_exchange` is the only place where a step of that ring happens.
"""

import itertools
import multiprocessing
import time
import traceback
from multiprocessing.connection import wait

import numpy as np


def chunk_bounds(n, world):
    """Where each of `world` chunks of n entries starts and stops, sized as by array_split."""
    if n < 0 or world < 1:
        raise ValueError(f"chunk_bounds needs n >= 0 and world >= 1, got n={n}, world={world}")
    size, larger = divmod(n, world)  # the first `larger` chunks hold one entry more
    starts = [j * size + min(j, larger) for j in range(world + 1)]
    return list(itertools.pairwise(starts))


class Comm:
    """One rank's end of the pipes, with the collectives built on them."""

    def __init__(self, rank, world, pipes, gate):
        self.rank, self.world = rank, world
        self.bytes_sent = 0
        self._pipes = pipes  # other rank -> Connection
        self._gate = gate

    @property
    def _left(self):
        return (self.rank - 1) % self.world

    @property
    def _right(self):
        return (self.rank + 1) % self.world

    def _pipe(self, other):
        if other not in self._pipes:
            raise ValueError(f"rank {self.rank} of {self.world} has no channel to rank {other}")
        return self._pipes[other]

    def send(self, x, dst):
        """Send a copy of x to rank dst."""
        x = np.asarray(x)
        self._pipe(dst).send(x)
        self.bytes_sent += x.nbytes

    def recv(self, src):
        """Wait for the next array from rank src."""
        # Newer pickle protocols rebuild an array read-only if the sender's was: copy it.
        return np.array(self._pipe(src).recv())

    def _exchange(self, chunk):
        """Send a chunk right and return the one from the left; odd ranks receive first."""
        if self.rank % 2 == 0:
            self.send(chunk, self._right)
            return self.recv(self._left)
        arrived = self.recv(self._left)
        self.send(chunk, self._right)
        return arrived

    def reduce_scatter(self, x):
        """Chunk `rank` of the sum: world - 1 steps, world - 1 chunks sent."""
        work = np.array(x, order="C").reshape(-1)  # a copy: the caller's array stays as it is
        chunks = [work[start:stop] for start, stop in chunk_bounds(work.size, self.world)]
        for step in range(self.world - 1):
            send_chunk = (self.rank - step - 1) % self.world
            recv_chunk = (self.rank - step - 2) % self.world
            chunks[recv_chunk] += self._exchange(chunks[send_chunk])
        return chunks[self.rank].copy()

    def all_gather(self, x):
        """Every rank's chunk in rank order: world - 1 steps, world - 1 chunks sent."""
        chunks = {self.rank: np.asarray(x).reshape(-1)}
        for step in range(self.world - 1):
            send_chunk = (self.rank - step) % self.world
            recv_chunk = (self.rank - step - 1) % self.world
            chunks[recv_chunk] = self._exchange(chunks[send_chunk])
        return np.concatenate([chunks[j] for j in range(self.world)])

    def all_reduce(self, x, op="sum"):
        """The sum or mean over all ranks, in x's shape: both halves, 2 (world - 1) steps."""
        if op not in ("sum", "mean"):
            raise ValueError(f"all_reduce knows the ops 'sum' and 'mean', got {op!r}")
        total = self.all_gather(self.reduce_scatter(x)).reshape(np.shape(x))
        if op == "mean":
            total /= self.world
        return total

    def broadcast(self, x, src):
        """Rank src's x, passed around the ring to the right and not back to src."""
        if src not in range(self.world):
            raise ValueError(f"broadcast from rank {src}, but there are {self.world} ranks")
        x = np.array(x) if self.rank == src else self.recv(self._left)
        if self._right != src:
            self.send(x, self._right)
        return x

    def barrier(self):
        """Wait until every rank has arrived."""
        self._gate.wait()


def spawn(fn, world, *args, timeout=60.0):
    """Run fn(comm, *args) in `world` processes and return their results by rank."""
    if world < 1:
        raise ValueError(f"spawn needs world >= 1, got {world}")
    deadline = time.monotonic() + timeout
    context = multiprocessing.get_context("spawn")
    # Held here until the end: a rank whose neighbour failed just waits, instead of adding an
    # end-of-file error of its own that could be taken for the cause.
    pipes = _connect(context, world)
    gate = context.Barrier(world)
    processes, inboxes = [], []
    try:
        for rank in range(world):
            inbox, outbox = context.Pipe(duplex=False)
            process_args = (outbox, rank, world, pipes[rank], gate, fn, args)
            process = context.Process(target=_run_rank, args=process_args)
            process.start()
            outbox.close()  # the rank holds the only copy now: its death is our end of file
            processes.append(process)
            inboxes.append(inbox)
        results = _collect(processes, inboxes, deadline)
        for process in processes:
            process.join(1.0)  # leave time for output to be flushed
        return results
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        ends = [end for by_rank in pipes for end in by_rank.values()]
        for end in ends + inboxes:
            end.close()


def _connect(context, world):
    """Join every pair of ranks: pipes[a][b] is a's end of the pipe between a and b."""
    pipes = [{} for _ in range(world)]
    for a, b in itertools.combinations(range(world), 2):
        pipes[a][b], pipes[b][a] = context.Pipe(duplex=True)
    return pipes


def _run_rank(outbox, rank, world, pipes, gate, fn, args):
    """What a new process does: run fn, report (True, result) or (False, traceback text)."""
    try:
        outbox.send((True, fn(Comm(rank, world, pipes, gate), *args)))
    except BaseException:  # sys.exit() in a rank is a failure like any other
        # As text, because not every exception pickles.
        outbox.send((False, traceback.format_exc()))


def _collect(processes, inboxes, deadline):
    """Take each report as it comes, so that none fills its pipe; the first failure raises."""
    results = [None] * len(processes)
    waiting = {inbox: rank for rank, inbox in enumerate(inboxes)}
    while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not finish in time")
        for inbox in ready:
            rank = waiting.pop(inbox)
            succeeded, outcome = _read_report(processes[rank], inbox)
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{outcome}")
            results[rank] = outcome
    return results


def _read_report(process, inbox):
    try:
        return inbox.recv()
    except (EOFError, OSError):  # it died before its report, or in the middle of it
        process.join(1.0)
        return False, f"it ended without a report, exit code {process.exitcode}"
