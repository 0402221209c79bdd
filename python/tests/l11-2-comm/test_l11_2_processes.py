"""What becomes of ranks as processes: spawn, failures, and the barrier that keeps them in step."""

import os
import re
import sys
import time
from functools import partial
from multiprocessing import active_children

import numpy as np
import pytest

from tinyllm.dist.comm import Comm, spawn

PATIENCE = 30.0  # seconds: most of them for slow machines, which take their time to start a rank
TOO_LONG = 90.0  # what a rank sleeps that should be ended


@pytest.fixture(autouse=True)
def _nobody_is_left_behind():
    started = time.monotonic()
    yield
    left = active_children()
    for process in left:
        process.kill()  # or pytest would wait for it
    assert not left
    assert time.monotonic() - started < TOO_LONG, "spawn waited for ranks that sleep"


# -- results ---------------------------------------------------------------------------------------


def leave_in_reverse_order(comm: Comm, *args):
    """The last rank returns first, and the others when they have word from the next one."""
    sent_at_first = comm.bytes_sent
    if comm.rank + 1 < comm.world:
        comm.recv(comm.rank + 1)
    if comm.rank > 0:
        comm.send(np.ones(1), comm.rank - 1)
    return (comm.rank, comm.world, sent_at_first, args), os.getpid()


def test_spawn_returns_what_the_ranks_return_in_rank_order():
    args = "text", {"nested": [1, 2.5]}
    results, pids = zip(*spawn(leave_in_reverse_order, 3, *args, timeout=PATIENCE), strict=True)
    assert list(results) == [(rank, 3, 0, args) for rank in range(3)]
    assert len({os.getpid(), *pids}) == 4, "every rank is a process of its own"


@pytest.mark.parametrize("world", [0, -1])
def test_there_is_no_world_without_a_rank(world):
    with pytest.raises(ValueError):
        spawn(leave_in_reverse_order, world)


# -- failures --------------------------------------------------------------------------------------


def blow_a_fuse():
    raise ArithmeticError("fuse 7 has blown")


def walk_out():
    sys.exit(0)


CLUES = {
    blow_a_fuse: ["in blow_a_fuse", "ArithmeticError", "fuse 7 has blown"],
    walk_out: ["in walk_out", "SystemExit"],
}


def lose_rank_1(comm: Comm, how):
    if comm.rank == 1:
        how()
    if comm.rank == 2:
        comm.recv(1)  # what will never come
    time.sleep(TOO_LONG)


@pytest.mark.parametrize("how", CLUES)
def test_the_error_of_a_rank_comes_home_with_its_traceback(how):
    with pytest.raises(RuntimeError) as caught:
        spawn(lose_rank_1, 3, how, timeout=PATIENCE)
    message = str(caught.value)
    assert re.search(r"\brank\W*1\b", message, re.IGNORECASE), message
    assert all(clue in message for clue in CLUES[how]), message


def test_a_rank_that_ends_without_a_word_is_missed():
    with pytest.raises(RuntimeError) as caught:
        spawn(lose_rank_1, 2, partial(os._exit, 0), timeout=PATIENCE)
    assert not isinstance(caught.value, TimeoutError), "only the deadline ended the run"


def oversleep(comm: Comm):
    time.sleep(TOO_LONG)


def test_time_runs_out():
    with pytest.raises(TimeoutError):
        spawn(oversleep, 1, timeout=0.3)


# -- the barrier -----------------------------------------------------------------------------------


def wait_for_each_other(comm: Comm, folder):
    """Each rank in turn is late. All leave a mark before the barrier, and count them behind it."""
    comm.all_reduce(np.zeros(comm.world))  # so that nobody is late in starting
    counts, sent = [], comm.bytes_sent
    for late in range(comm.world):
        if comm.rank == late:
            time.sleep(0.1)
        (folder / f"{late}-{comm.rank}").touch()
        comm.barrier()
        counts.append(len(list(folder.glob(f"{late}-*"))))
    return counts, comm.bytes_sent - sent


def test_nobody_passes_the_barrier_before_all_have_come(tmp_path):
    evidence = spawn(wait_for_each_other, 3, tmp_path, timeout=PATIENCE)
    assert evidence == [([3, 3, 3], 0)] * 3, "marks in each round, and bytes sent, of each rank"
