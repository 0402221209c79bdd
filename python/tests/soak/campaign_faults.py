"""What the ranks of a campaign do: a run of mixed operations, and in it one fault of one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from tinyllm.dist.comm import Comm

OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "send")
RUN = 6  # operations of a run


@dataclass(frozen=True)
class Plan:
    """One fault: who, what, in which operation, on how many entries."""

    kind: str
    rank: int
    at: int  # the operation that it comes before, or in the middle of
    op: str
    n: int
    delay: float  # seconds into the operation, for faults in the middle of it
    note: str  # a file in which the rank writes when it happened, and what it left behind


def call(comm: Comm, op: str, n: int, step: int) -> np.ndarray | None:
    """One operation; every rank has other data, every step other data."""
    x = np.arange(n) * 0.5 + comm.rank + step
    if op == "all_reduce":
        return comm.all_reduce(x)
    if op == "reduce_scatter":
        return comm.reduce_scatter(x)
    if op == "all_gather":
        return comm.all_gather(x[comm.rank :])
    if op == "broadcast":
        return comm.broadcast(x, step % comm.world)
    if op == "send":
        return pass_round(comm, x)
    return comm.barrier()


def pass_round(comm: Comm, x: np.ndarray) -> np.ndarray:
    """Point to point around the ring, by the parity rule."""
    left, right = (comm.rank - 1) % comm.world, (comm.rank + 1) % comm.world
    if comm.rank % 2 == 0:
        comm.send(x, right)
        return comm.recv(left)
    got = comm.recv(left)
    comm.send(x, right)
    return got


def run(comm: Comm, plan: Plan) -> int:
    """The whole run; the faulty rank departs from it at ``plan.at``."""
    for step in range(RUN):
        op = plan.op if step == plan.at else OPS[step % len(OPS)]
        if (comm.rank, step) == (plan.rank, plan.at):
            if FAULTS[plan.kind](comm, plan):
                return comm.rank
            continue
        call(comm, op, plan.n, step)
    return comm.rank


# -- faults: each returns whether the rank is to return; if not, it goes on to the next operation --


def now(plan: Plan, *left: int) -> None:
    with open(plan.note, "w") as file:
        print(time.monotonic(), *left, file=file)


def raises(comm: Comm, plan: Plan) -> None:
    now(plan)
    raise ValueError("planned")


def exits(comm: Comm, plan: Plan) -> None:
    now(plan)
    sys.exit(3)


def dies(comm: Comm, plan: Plan) -> None:
    now(plan)
    os._exit(7)


def is_killed(comm: Comm, plan: Plan) -> None:
    now(plan)
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed_inside(comm: Comm, plan: Plan) -> None:
    def kill() -> None:
        time.sleep(plan.delay)
        now(plan)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    while True:  # if the operation is over before, in the next one
        call(comm, plan.op, plan.n, plan.at)
        time.sleep(60)


def raises_inside(comm: Comm, plan: Plan) -> None:
    def interrupt(signum, frame) -> None:
        now(plan)
        raise ValueError("planned")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(plan.delay, 1e-5))
    call(comm, plan.op, plan.n, plan.at)
    time.sleep(60)


def leaves_a_sleeper(comm: Comm, plan: Plan) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    now(plan, sleeper.pid)
    os._exit(7)


def stops(comm: Comm, plan: Plan) -> None:
    now(plan)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def loops(comm: Comm, plan: Plan) -> None:
    now(plan)
    while True:
        pass


def skips(comm: Comm, plan: Plan) -> None:
    now(plan)


def calls_another(comm: Comm, plan: Plan) -> None:
    now(plan)
    call(comm, "all_gather" if plan.op == "barrier" else "barrier", plan.n, plan.at)


def calls_another_size(comm: Comm, plan: Plan) -> None:
    now(plan)
    call(comm, plan.op, plan.n + 1, plan.at)


def calls_once_more(comm: Comm, plan: Plan) -> None:
    now(plan)
    call(comm, plan.op, plan.n, plan.at)
    call(comm, plan.op, plan.n, plan.at)


def returns_early(comm: Comm, plan: Plan) -> bool:
    now(plan)
    return True


FAULTS = {
    fault.__name__: fault
    for fault in (
        raises,
        exits,
        dies,
        is_killed,
        is_killed_inside,
        raises_inside,
        leaves_a_sleeper,
        stops,
        loops,
        skips,
        calls_another,
        calls_another_size,
        calls_once_more,
        returns_early,
    )
}


def clean(comm: Comm, seed: int, operations: int) -> str:
    """Many mixed operations without a fault; the digest of all that they returned."""
    rng = np.random.default_rng(seed)
    digest = sha256()
    for step in range(operations):
        op = OPS[rng.integers(len(OPS))]
        n = int(rng.choice([0, 1, 7, 100, 3000, 40_000], p=[0.1, 0.2, 0.3, 0.2, 0.15, 0.05]))
        got = call(comm, op, n + comm.world, step)
        if got is not None:
            digest.update(got.tobytes())
    return digest.hexdigest()
