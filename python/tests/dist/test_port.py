"""One rank's side of the mesh: what it checks, counts, refuses and remembers."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from dist_worlds import hang_up, in_threads

from tinyllm.dist import CommError, DesyncError, frame
from tinyllm.dist.board import DOING, WRITING, Board
from tinyllm.dist.comm import Comm, spawn
from tinyllm.dist.frame import Frame

x = np.arange(6.0)


def gather_dtypes(comm: Comm) -> None:
    comm.all_gather(np.arange(3, dtype="f8" if comm.rank else "i8"))


def broadcast_shapes(comm: Comm) -> None:
    comm.broadcast(np.zeros(3 + comm.rank), 0)


@pytest.mark.parametrize("fn", [gather_dtypes, broadcast_shapes])
def test_arrays_that_travel_whole_must_agree_where_they_can(fn) -> None:
    with pytest.raises(DesyncError, match="float64"):
        in_threads(2, fn)


def reduce_and_count(comm: Comm, n: int) -> tuple[int, int]:
    messages = 0
    for link in filter(None, comm._port._links):
        send = link.send

        def count(*args, send=send) -> None:
            nonlocal messages
            messages += 1
            send(*args)

        link.send = count
    comm.all_reduce(np.arange(float(n)))
    reducing = messages
    comm.barrier()
    return reducing, messages - reducing


@pytest.mark.parametrize("n", [0, 1, 3, 50])
def test_only_chunks_that_hold_something_travel(n: int) -> None:
    world = 5
    counts = in_threads(world, reduce_and_count, n)
    chunks = min(n, world)  # that are not empty; each takes world - 1 steps in either half
    assert sum(reducing for reducing, _ in counts) == 2 * (world - 1) * chunks
    assert [barrier for _, barrier in counts] == [world - 1] * world


def message_across_a_collective(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(x, 1)
    comm.barrier()
    if comm.rank == 1:
        comm.recv(0)


def test_a_send_and_its_recv_stand_between_the_same_collectives() -> None:
    with pytest.raises(DesyncError) as caught:
        in_threads(2, message_across_a_collective)
    assert "rank 0: send to rank 1 (message 1, after #0)" in str(caught.value)
    assert "rank 1: barrier #1" in str(caught.value)


def use_after_failure(comm: Comm) -> str:
    try:
        comm.all_reduce(x[comm.rank :])
    except CommError:
        hang_up(comm)
    before = comm.bytes_sent
    with pytest.raises(CommError, match="broken since all_reduce #1") as again:
        comm.barrier()
    assert comm.bytes_sent == before
    assert isinstance(again.value.__cause__, CommError)
    return str(again.value)


def test_a_comm_stays_broken_and_says_why() -> None:
    for rank, said in enumerate(in_threads(2, use_after_failure)):
        assert said.startswith(f"rank {rank}: barrier on a Comm that is broken")


def two_threads(comm: Comm) -> str:
    if comm.rank == 1:
        comm.send(x, 0)  # not before rank 0 says so
        return ""
    with comm._port.operation("recv", root=1):  # as if another thread were in a call
        with pytest.raises(RuntimeError, match="one thread at a time") as caught:
            comm.barrier()
        comm._port.receive(1)
    return str(caught.value)


def test_two_threads_in_one_comm_are_refused() -> None:
    said, _ = in_threads(2, two_threads)
    assert "barrier was called while another thread is in recv from rank 1" in said


def too_short(comm: Comm) -> str:
    """Rank 0 sends a chunk of 3 entries in place of 30,000, and no more."""
    try:
        if comm.rank == 0:
            with comm._port.operation("reduce_scatter", x, redop="sum"):
                comm._port.send(1, x[:3])
                time.sleep(0.5)
        else:
            comm._port._board = Board(2)  # so that only the header can tell
            comm.all_reduce(np.arange(60_000.0))
    except DesyncError as error:
        return str(error)
    return ""


def test_a_message_that_is_too_short_is_told_by_its_header() -> None:
    start = time.monotonic()
    _, said = in_threads(2, too_short)
    assert time.monotonic() - start < 2
    assert "rank 0 sent it a message of reduce_scatter #1 (float64[6], sum)" in said


def alarmed(comm: Comm) -> str:
    if comm.rank == 1:
        time.sleep(0.2)
        comm._port._alarm[0] = 1
        time.sleep(0.5)
        return ""
    with pytest.raises(DesyncError) as caught:
        comm.barrier()
    return str(caught.value)


def test_the_alarm_reaches_a_rank_that_waits() -> None:
    start = time.monotonic()
    said, _ = in_threads(2, alarmed)
    assert time.monotonic() - start < 2
    assert "rank 0 is in barrier #1" in said


def refuses(comm: Comm) -> str:
    """Nothing on the board is certain here: only the message itself tells."""
    if comm.rank == 0:
        comm.send(x, 1)
        return ""
    try:
        with comm._port.operation("recv", root=0):
            comm._port.call.numbers[frame.NTH] = 9  # it waits for the ninth
            comm._port._slot.enter(comm._port.call.head)
            comm._port.receive(0)
    except DesyncError as error:
        return str(error)
    return ""


def test_a_refused_message_is_shown_beside_the_call() -> None:
    _, said = in_threads(2, refuses)
    assert "rank 1: recv from rank 0 (message 9, after #0)" in said
    assert "rank 0: send to rank 1 (message 1, after #0)" in said


def leaves_one_after_the_other(comm: Comm) -> tuple[str, int | None]:
    """Rank 2 leaves; so does rank 3 over it, and then rank 0 over rank 3."""
    if comm.rank == 2:
        hang_up(comm)
        return "", None
    try:
        comm.barrier()
    except CommError as error:
        hang_up(comm)
        return str(error), error.rank
    return "", None


def test_the_blame_travels_along_the_ring() -> None:
    ranks = in_threads(5, leaves_one_after_the_other)
    assert [blamed for _, blamed in ranks] == [2, 2, None, 2, 2]
    assert any("; it gave up over rank 2" in said for said, _ in ranks)


def is_read_while_it_writes(comm: Comm) -> tuple[int, int]:
    """Rank 1 writes two headers in turn, rank 0 reads: how often, and how often a mixture."""
    board, slot, read, mixed = comm._port._board, comm._port._slot, 0, 0
    heads = [Frame("all_reduce", k, x.dtype, (0, *[k] * 63)).pack() for k in (1, 2)]
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        if comm.rank == 1:
            for head in heads:
                slot.enter(head)
        else:
            entry = board.slot(1).read(1)
            read += 1
            said = entry.frame and {entry.frame.seq, *entry.frame.shape[1:]}
            mixed += said not in (None, {1}, {2})
    slot.enter(heads[0])
    return read, mixed


def test_a_slot_is_not_read_half_written() -> None:
    (read, mixed), _ = spawn(is_read_while_it_writes, 2, method="forkserver")
    assert read > 1000 and mixed == 0


class Spy:
    """In a header's place: what stands beside it while it is written."""

    def __init__(self, words: memoryview) -> None:
        self.words, self.seen = words, []

    def __setitem__(self, where, head) -> None:
        self.seen.append(self.words[DOING])


def is_watched_as_it_writes(comm: Comm) -> list[int]:
    port, slot = comm._port, comm._port._slot
    slot.head = port._head = spy = Spy(slot.words)
    with port.operation("barrier"):
        pass
    slot.enter(port.call.head)
    return spy.seen


def test_a_slot_says_that_its_header_is_being_written() -> None:
    assert in_threads(1, is_watched_as_it_writes) == [[WRITING, WRITING]]


def test_who_reads_waits_until_it_is_written() -> None:
    board = Board(1)
    slot = board.slot(0)
    before, after = (Frame("all_reduce", k, x.dtype, (k,)).pack() for k in (5, 6))
    slot.enter(before)
    slot.words[DOING] = WRITING
    slot.head[:32] = after[:32]  # the number is new, the shape is not
    rest = threading.Timer(0.005, slot.enter, [after])
    rest.start()
    assert slot.read(0).frame == Frame("all_reduce", 6, x.dtype, (6,))
    rest.join()
    board.close()
