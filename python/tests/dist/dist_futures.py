"""Rank functions of test_nonblocking, in a module that is quick to import."""

from __future__ import annotations

import os
import threading
import time
from concurrent import futures
from pathlib import Path

import numpy as np
from dist_worlds import data

from tinyllm.dist import algorithms, nonblocking
from tinyllm.dist.comm import Comm, spawn

__all__ = ["spawn"]  # for whoever runs one of these from a command line


def returns_early(comm: Comm) -> list[np.ndarray]:
    """Nobody waits for anything; the results are shipped when all is done."""
    n = 300_000 // comm.world
    outs = [np.zeros(n), np.zeros(n), np.zeros(n * comm.world)]
    nonblocking.all_reduce(comm, data(comm.rank, n), out=outs[0])
    nonblocking.call(comm, algorithms.all_reduce, data(comm.rank, n), "mean", "tree", out=outs[1])
    nonblocking.all_gather(comm, data(comm.rank, n), out=outs[2])
    assert threading.active_count() == 2
    return outs


def looks_away(comm: Comm, how: str) -> str:
    x = np.ones(3 + (comm.rank == 1))
    future = nonblocking.all_reduce(comm, x)  # the line to be shown
    nonblocking.barrier(comm)  # fails as well, but for no reason of its own
    if how == "waits":
        futures.wait([future])
    return type(future.exception()).__name__ if how == "looks" else ""


def refused_at_the_end(comm: Comm) -> None:
    nonblocking.barrier(comm)
    if comm.rank == 1:
        nonblocking.all_gather(comm, [None])


def dies(comm: Comm) -> None:
    pending = [nonblocking.all_reduce(comm, np.ones(100_000)) for _ in range(2)]
    pending[0].result()
    if comm.rank == 2:
        os._exit(7)
    time.sleep(0.1)
    nonblocking.all_reduce(comm, np.ones(100_000))


def raises_meanwhile(comm: Comm) -> None:
    nonblocking.all_reduce(comm, np.ones(3))
    if comm.rank == 1:
        raise KeyError("mine")


def never_comes(comm: Comm) -> None:
    if comm.rank != 1:
        nonblocking.barrier(comm)
        return
    time.sleep(60)


def runs_out_of_patience(comm: Comm) -> None:
    comm.timeout = 0.3
    if comm.rank == 1:
        time.sleep(60)
    nonblocking.barrier(comm).result()


def busy(comm: Comm, path: str) -> None:
    """Until Ctrl-C; rank 0 says when all are at it."""
    x = np.ones(100_000)
    while True:
        pending = [nonblocking.all_reduce(comm, x) for _ in range(10)]
        pending[-1].result()
        if comm.rank == 0:
            Path(path).touch()
