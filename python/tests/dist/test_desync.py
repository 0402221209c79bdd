"""Ranks that disagree: every rank learns it, sees both calls, and the odd one out is named."""

from __future__ import annotations

import time

import numpy as np
import pytest
from dist_worlds import MESHES, in_threads

from tinyllm.dist import CommTimeout, DesyncError, diagnosis
from tinyllm.dist.board import RECEIVING, RETURNED, SENDING, Entry
from tinyllm.dist.comm import Comm, spawn
from tinyllm.dist.frame import Frame

x = np.arange(8.0)
ODD = 2  # the rank that does something else


def rest(comm: Comm) -> None:
    """What all ranks do from the third collective on."""
    comm.all_reduce(x)
    comm.barrier()
    comm.all_gather(x)


def swap(comm: Comm) -> None:
    comm.barrier()
    comm.all_reduce(x)
    comm.all_gather(x)


def then_the_rest(*first):
    return lambda comm: [call(comm) for call in (*first, rest)]


# What rank 2 does instead of the rest, and what must be said of it.
WAYS = {
    "another collective": (lambda c: c.reduce_scatter(x), "reduce_scatter #3 (float64[8], sum)"),
    "barrier": (lambda c: c.barrier(), "barrier #3"),
    "all_gather": (lambda c: c.all_gather(x), "all_gather #3 (float64)"),
    "broadcast": (lambda c: c.broadcast(x, 0), "broadcast #3 (float64[8], src 0)"),
    "broadcast of its own": (lambda c: c.broadcast(x, ODD), "broadcast #3 (float64[8], src 2)"),
    "broadcast to nobody": (lambda c: c.broadcast(None, 3), "broadcast #3 (src 3)"),
    "another shape": (lambda c: c.all_reduce(x[1:]), "all_reduce #3 (float64[7], sum)"),
    "another form": (lambda c: c.all_reduce(x.reshape(2, 4)), "all_reduce #3 (float64[2,4], sum)"),
    "a large array": (lambda c: c.all_reduce(np.zeros(10**6)), "(float64[1000000], sum)"),
    "an empty array": (lambda c: c.all_reduce(x[:0]), "all_reduce #3 (float64[0], sum)"),
    "another dtype": (lambda c: c.all_reduce(x.view("i8")), "all_reduce #3 (int64[8], sum)"),
    "another op": (lambda c: c.all_reduce(x, "mean"), "all_reduce #3 (float64[8], mean)"),
    "an extra call": (then_the_rest(Comm.barrier), "barrier #3"),
    "an extra call like the last": (then_the_rest(lambda c: c.broadcast(x, ODD)), "src 2"),
    "a skipped call": (lambda c: (c.barrier(), c.all_gather(x)), "barrier #3"),
    "swapped calls": (swap, "barrier #3"),
    "an early return": (lambda c: None, "returned after #2"),
    "a send": (lambda c: (c.send(x, 3), c.barrier()), "barrier #3"),
    "a recv from the left": (lambda c: c.recv(1), "recv from rank 1 (message 1, after #2)"),
    "a recv from the right": (lambda c: c.recv(3), "recv from rank 3 (message 1, after #2)"),
    "a recv from afar": (lambda c: c.recv(0), "recv from rank 0 (message 1, after #2)"),
}


def diverge(comm: Comm, way: str, instead=None) -> tuple[str, int | None]:
    comm.all_reduce(x)
    comm.barrier()
    try:
        (instead or (WAYS[way][0] if comm.rank == ODD else rest))(comm)
        if comm.rank == ODD:
            comm._port._slot.mark(5)  # returned, as the process of a rank notes it
    except DesyncError as error:
        return str(error), error.rank
    return "", None


@pytest.mark.parametrize("mesh", ["pipe", "shm"])
@pytest.mark.parametrize("way", WAYS)
def test_every_rank_learns_that_one_disagrees(way: str, mesh: str) -> None:
    start = time.monotonic()
    ranks = in_threads(4, diverge, way, mesh=MESHES[mesh])
    assert time.monotonic() - start < 2
    for rank, (said, blamed) in enumerate(ranks):
        if rank == ODD and not said:
            assert way == "an early return" or WAYS[way][1] in ranks[0][0]
            continue  # its call needed nobody
        # As a source rank 2 waits for nobody; it may be in its next call when it is noticed.
        # And rank 3 may hold the message of the send before rank 2 is in its barrier.
        known = WAYS[way][1], "all_reduce #4", "message of send to rank 3"
        assert any(call in said for call in known), f"rank {rank}"
        assert "all_reduce #3 (float64[8], sum)" in said, f"rank {rank}"
        assert blamed in (ODD, None), f"rank {rank}"
    assert ODD in {blamed for _, blamed in ranks} or "recv" in way or way == "a send"


def misname_the_source(comm: Comm) -> str:
    try:
        comm.broadcast(None, 1 - comm.rank)
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["pipe", "shm"])
def test_where_nobody_sends_the_board_tells(mesh: str) -> None:
    start = time.monotonic()
    for said in in_threads(2, misname_the_source, mesh=MESHES[mesh]):
        assert "rank 0: broadcast #1 (src 1)" in said
        assert "rank 1: broadcast #1 (src 0)" in said
        assert "against the rest" not in said, "of two, neither is the odd one out"
    assert time.monotonic() - start < 0.5


def enter_later(comm: Comm) -> str:
    """Rank 3 comes when the dispute is over, and must not wait for anybody."""
    if comm.rank == 3:
        time.sleep(0.6)
    try:
        comm.all_reduce(x[comm.rank % 2 :])
    except DesyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", ["pipe", "shm"])
def test_a_rank_that_comes_later_is_told_at_once(mesh: str) -> None:
    said = in_threads(4, enter_later, mesh=MESHES[mesh])
    assert said[3].startswith(
        "rank 3 calls all_reduce #1 (float64[7], sum): the ranks are not in the same call"
    )
    assert "ranks 0 and 2: all_reduce #1 (float64[8], sum)" in said[3]


# -- in processes ----------------------------------------------------------------------------------


def skips_one(comm: Comm) -> None:
    for step in range(5):
        if (comm.rank, step) != (1, 3):
            comm.all_reduce(x)
        comm.barrier()


def test_spawn_names_the_odd_one_out_and_shows_where_it_stands() -> None:
    with pytest.raises(DesyncError) as caught:
        spawn(skips_one, 3)
    said = str(caught.value)
    assert caught.value.rank == 1
    assert "ranks 0 and 2: all_reduce #7 (float64[8], sum)" in said
    assert "rank 1: barrier #7" in said
    assert "Rank 1 against the rest" in said
    assert "on rank 1:\nTraceback" in said
    assert "in skips_one\n    comm.barrier()" in said


def returns_early(comm: Comm) -> int:
    comm.barrier()
    if comm.rank != 1:
        comm.all_reduce(x)
    return comm.rank


def test_an_early_return_is_told_with_its_number() -> None:
    with pytest.raises(DesyncError, match="rank 1: returned after #1") as caught:
        spawn(returns_early, 3)
    assert caught.value.rank == 1
    assert "ranks 0 and 2: went on to all_reduce #2 (float64[8], sum)" in str(caught.value)


def test_who_returned_is_held_against_all_that_went_on() -> None:
    entries = [
        Entry(0, RETURNED, frame=Frame("barrier", 1)),
        Entry(1, RECEIVING, 0, frame=Frame("all_gather", 3, np.dtype("f8"), (4,))),
        Entry(2, RECEIVING, 1, frame=Frame("all_gather", 3, np.dtype("f8"), (4,))),
        Entry(3, SENDING, 0, frame=Frame("broadcast", 2, np.dtype("f8"), (4,), root=1)),
    ]
    known = diagnosis.dispute(entries)
    assert known.culprit == 0
    assert "rank 0: returned after #1" in str(known)
    assert "ranks 1, 2 and 3: went on to all_gather #3 (float64), broadcast #2" in str(known)


def keeps_a_secret(comm: Comm, secret: str) -> int:
    comm.barrier()
    if secret == "message" and comm.rank == 1:
        comm.send(x, 0)
    if secret == "broadcast" and comm.rank == 0:
        comm.broadcast(x, 0)
    time.sleep(0.3)  # nobody is gone when it is sent
    return comm.rank


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ("message", "rank 1: sent 1 to rank 0"),
        ("broadcast", "rank 0: returned after #2"),
    ],
)
def test_what_is_left_over_at_the_end_is_told(secret: str, says: str) -> None:
    with pytest.raises(DesyncError, match="all ranks returned, but") as caught:
        spawn(keeps_a_secret, 3, secret)
    assert says in str(caught.value)


def notices(comm: Comm) -> str:
    try:
        comm.all_reduce(x[comm.rank :])
    except DesyncError as error:
        return str(error)
    return ""


def test_ranks_may_catch_it_and_return() -> None:
    for said in spawn(notices, 2):
        assert "rank 0: all_reduce #1 (float64[8], sum)" in said
        assert "rank 1: all_reduce #1 (float64[7], sum)" in said


# -- limits and circles ----------------------------------------------------------------------------


def all_send(comm: Comm, limit: float) -> str:
    comm.timeout = limit
    try:
        comm.send(np.zeros(1 << 17), (comm.rank + 1) % comm.world)
    except CommTimeout as error:
        return str(error)
    return ""


def all_receive(comm: Comm, limit: float) -> str:
    comm.timeout = limit
    try:
        comm.recv((comm.rank + 1) % comm.world)
    except CommTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fn", [all_send, all_receive])
def test_an_operations_own_limit_draws_the_circle(fn) -> None:
    start = time.monotonic()
    said = in_threads(3, fn, 0.4)
    assert 0.3 < time.monotonic() - start < 2
    first = next(text for text in said if "→" in text)
    assert "longer than comm.timeout, 0.4 s" in first
    what = "sending and none receives" if fn is all_send else "receiving and none sends"
    assert f"each is {what}" in first
    assert "0 → 1 → 2 → 0" in first or "1 → 2 → 0 → 1" in first or "2 → 0 → 1 → 2" in first


def waits_for_a_busy_rank(comm: Comm) -> tuple[str, int | None]:
    comm.timeout = 0.3
    try:
        if comm.rank == 2:
            time.sleep(1.0)
        else:
            comm.barrier()
    except CommTimeout as error:
        return str(error), error.rank
    return "", None


@pytest.mark.parametrize("mesh", ["pipe", "shm"])
def test_an_operations_own_limit_names_who_holds_it_up(mesh: str) -> None:
    ranks = in_threads(3, waits_for_a_busy_rank, mesh=MESHES[mesh])
    said, blamed = ranks[0]
    assert said.startswith("rank 0 is in barrier #1, waiting for a message from rank 2, longer")
    assert "rank 2 not done, and others wait" in said
    assert blamed == 2


def circle(comm: Comm) -> None:
    comm.barrier()
    comm.send(np.zeros(1 << 17), (comm.rank + 1) % comm.world)
    comm.recv((comm.rank - 1) % comm.world)


def test_a_deadline_draws_the_circle() -> None:
    with pytest.raises(CommTimeout) as caught:
        spawn(circle, 3, timeout=2.0, method="forkserver")
    said = str(caught.value)
    assert "0 → 1 → 2 → 0: each is sending and none receives" in said
    assert "rank 1 is in send to rank 2 (message 1, after #1), waiting for rank 2 to take" in said
    assert caught.value.rank is None
