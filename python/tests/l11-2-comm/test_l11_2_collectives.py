"""What ranks say to each other: chunk_bounds and Comm, tested by their contract alone.

`promised` is the contract in plain NumPy: what a call returns on each rank, to the last bit, and
the bytes that it sends. A test makes a list of calls on all ranks of a world and compares. Only the
parent works out what is right, so that no rank can find the answer lying in its memory.
"""

from functools import cache, partial, reduce
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from tinyllm.dist.comm import Comm, chunk_bounds, spawn

PATIENCE = 30.0  # seconds: most of them for slow machines, which take their time to start a rank
HANG = 15.0  # where a fault means that ranks wait for each other until somebody ends them

SHAPES = [(5, 7), (12,), (3, 1, 1), (1,), (), (0, 2)]  # some have fewer entries than ranks

same = partial(np.testing.assert_array_equal, strict=True)  # strict: in shape and dtype as well


# -- the model -------------------------------------------------------------------------------------


def part(rank, shape):
    """What a rank brings: random reals, others on each rank, whose sum depends on the order.

    A list of shapes has one for each rank. In memory the entries lie in Fortran's order, because
    "flat" means C's order, whatever the memory says.
    """
    if isinstance(shape, list):
        shape = shape[rank]
    return np.asarray(np.random.default_rng([rank, *shape]).standard_normal(shape[::-1])).T


@cache
def ring_sum(world, shape):
    """The chunks of the sum of all parts: chunk j sets out from rank j + 1 and ends at rank j."""
    chunks = [np.array_split(part(rank, shape).ravel(), world) for rank in range(world)]
    return [
        reduce(np.add, [chunks[(owner + 1 + step) % world][owner] for step in range(world)])
        for owner in range(world)
    ]


def promised(world, rank, name, shape, *args):
    """What comm.name(part, *args) returns on a rank, and how many bytes this rank sends for it."""
    right = (rank + 1) % world
    if name == "broadcast":
        [src] = args
        x = part(src, shape)
        return x, 0 if right == src else x.nbytes
    if name == "all_gather":
        parts = [part(other, shape).ravel() for other in range(world)]
        return np.concatenate(parts), bytes_of_all_but(right, parts)
    chunks = ring_sum(world, shape)
    if name == "reduce_scatter":
        return chunks[rank], bytes_of_all_but(rank, chunks)
    total = np.concatenate(chunks).reshape(shape)
    sent = bytes_of_all_but(rank, chunks) + bytes_of_all_but(right, chunks)
    return total / world if "mean" in args else total, sent


def bytes_of_all_but(rank, chunks):
    return sum(chunk.nbytes for owner, chunk in enumerate(chunks) if owner != rank)


def make_calls(comm: Comm, calls):
    return [make_call(comm, name, part(comm.rank, shape), *args) for name, shape, *args in calls]


def make_call(comm, name, x, *args):
    """The result and the bytes sent, if the call does what is asked of every collective."""
    before, sent = x.copy(), comm.bytes_sent
    result = getattr(comm, name)(x, *args)
    same(x, before, err_msg=f"{name} changed its argument")
    assert result.flags.writeable, f"{name} returned a read-only array"
    x.fill(np.nan)  # x is the caller's again: a result that is still made of it will show it
    return result, comm.bytes_sent - sent


def agree(world, calls, timeout=PATIENCE):
    """Every rank gets what is promised, and sends the bytes that are promised."""
    for rank, outcomes in enumerate(spawn(make_calls, world, calls, timeout=timeout)):
        for (name, shape, *args), (result, sent) in zip(calls, outcomes, strict=True):
            call = f"{name}({', '.join(['x', *map(repr, args)])})"
            what = f"{call} with x of shape {shape} on rank {rank} of {world}"
            expected, nbytes = promised(world, rank, name, shape, *args)
            same(result, expected, err_msg=what)
            same(sent, nbytes, err_msg=f"{what}: bytes sent")


# -- chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 8))
def test_chunks_are_those_of_array_split(world):
    for n in range(3 * world + 1):
        sizes = [piece.size for piece in np.array_split(np.zeros(n), world)]
        assert chunk_bounds(n, world) == list(pairwise(accumulate(sizes, initial=0)))


@pytest.mark.parametrize(("n", "world"), [(-1, 2), (3, 0), (3, -1)])
def test_nothing_is_cut_into_nothing(n, world):
    with pytest.raises(ValueError):
        chunk_bounds(n, world)


# -- collectives -----------------------------------------------------------------------------------


def test_reduce_scatter_leaves_each_rank_its_chunk_of_the_sum():
    agree(3, list(product(["reduce_scatter"], SHAPES)))


@pytest.mark.parametrize("world", [2, 5])
def test_all_reduce_gives_every_rank_the_same_bits(world):
    ops = [(), ("sum",), ("mean",)]
    agree(world, [("all_reduce", shape, *op) for shape, op in product(SHAPES, ops)])


def test_all_gather_joins_what_the_ranks_bring():
    uneven = [[(3, 2), (4,), (), (0, 5)], [(0,), (1,), (2, 2), (7,)], [(9,), (0,), (0,), (9,)]]
    agree(4, list(product(["all_gather"], SHAPES + uneven)))


def test_broadcast_goes_round_and_stops_before_its_source():
    agree(3, list(product(["broadcast"], SHAPES, range(3))))


@pytest.mark.parametrize("world", [2, 3])
def test_messages_larger_than_a_pipe_get_through(world):
    mib = 2**20 // 8  # entries; a pipe that nobody reads holds part of that
    calls = [("all_reduce", (world, mib)), ("reduce_scatter", (world, mib)), ("all_gather", (mib,))]
    agree(world, calls, timeout=HANG)


def test_a_rank_alone_is_its_own_neighbour():
    sums_and_copies = product(["all_reduce", "reduce_scatter", "all_gather"], SHAPES)
    means = product(["all_reduce"], SHAPES, ["mean"])
    broadcasts = product(["broadcast"], SHAPES, [0])
    agree(1, [*sums_and_copies, *means, *broadcasts])


def call_with_lists(comm: Comm):
    x = [[1.5, 2.5], [0.25, comm.rank]]
    return comm.all_reduce(x), comm.all_gather(x), comm.broadcast(x, 0)


def test_nested_lists_are_arrays():
    x = np.array([[[1.5, 2.5], [0.25, rank]] for rank in range(2)])
    for results in spawn(call_with_lists, 2, timeout=PATIENCE):
        for result, expected in zip(results, [x[0] + x[1], x.ravel(), x[0]], strict=True):
            same(result, expected)


# -- two ranks -------------------------------------------------------------------------------------


def letters(src, dst):
    """What src sends to dst, kind after kind; nobody else sends these numbers."""
    kinds = ["f8", "f4", "f2", "c16", "i8", "i4", "u1", "f8"]
    shapes = [(2, 3), (4,), (1, 3, 2), (2, 2), (), (0, 4), (7,), (2, 3)]
    numbers = 30 * src + 10 * dst + np.arange(7)
    return [
        np.resize(np.roll(numbers, i), shape[::-1]).T.astype(kind)
        for i, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    ]


def correspond(comm: Comm):
    """All write to rank 0, then to rank 1, and so on, who reads the last rank's letters first."""
    inbox = {}
    for dst in range(comm.world):
        if comm.rank == dst:
            senders = [src for src in reversed(range(comm.world)) if src != dst]
            inbox = {src: [comm.recv(src) for _ in letters(src, dst)] for src in senders}
        else:
            for x in letters(comm.rank, dst):
                comm.send(x, dst)
                x.fill(0)  # too late to reach dst
    assert all(x.flags.writeable for mail in inbox.values() for x in mail), "read-only mail"
    return inbox, comm.bytes_sent


def test_messages_arrive_as_they_were_when_sent_and_in_that_order():
    for rank, (inbox, sent) in enumerate(spawn(correspond, 3, timeout=PATIENCE)):
        for src, mail in inbox.items():
            for i, (got, expected) in enumerate(zip(mail, letters(src, rank), strict=True)):
                same(got, expected, err_msg=f"message {i} from rank {src} to rank {rank}")
        nbytes = sum(x.nbytes for dst in inbox for x in letters(rank, dst))
        same(sent, nbytes, err_msg=f"send on rank {rank}: bytes sent")


# -- refusals --------------------------------------------------------------------------------------


def ask_for_the_impossible(comm: Comm):
    x = part(comm.rank, (4,))
    for op in ["max", "MEAN", ""]:
        with pytest.raises(ValueError):
            comm.all_reduce(x, op)
    for nobody in [-1, comm.world]:
        with pytest.raises(ValueError):
            comm.broadcast(x, nobody)
    for no_peer in [-1, comm.world, comm.rank]:
        with pytest.raises(ValueError):
            comm.send(x, no_peer)
        with pytest.raises(ValueError):
            comm.recv(no_peer)
    return comm.bytes_sent, comm.reduce_scatter(x)


def test_a_refused_call_sends_nothing_and_breaks_nothing():
    for rank, (sent, chunk) in enumerate(spawn(ask_for_the_impossible, 2, timeout=PATIENCE)):
        same(sent, 0, err_msg=f"bytes that rank {rank} sent in calls that were refused")
        same(chunk, ring_sum(2, (4,))[rank], err_msg="reduce_scatter after the refused calls")
