"""The ten course tests of module L11.2, in the order of the chapter's table.

They use the contract (comm.pyi) and nothing else, so they can judge any comm.py. A worker below
runs in every rank, collects evidence and returns it; the test then compares the evidence here,
in the parent. Only the parent works out the right answers. A rank never holds one, so a buffer
that a faulty collective forgot to fill cannot happen to contain it.
"""

import itertools
import multiprocessing
import re
import time

import numpy as np
import pytest

from tinyllm.dist.comm import Comm, chunk_bounds, spawn

# Timeouts in seconds. The ranks of a right comm.py need a fraction of one; the rest is there for
# a slow machine to start its interpreters.
START = 30.0
HANG = 6.0  # where a hang is the very failure that the test looks for

MIB = 2**20


# Helpers


def run(worker, world, *args, timeout=START):
    """Spawn `world` ranks of `worker`; return what each of them returned, by rank."""
    __tracebackhide__ = True
    call = f"spawn({worker.__name__}, world={world}, timeout={timeout})"
    results, error = attempt(spawn, worker, world, *args, timeout=timeout)
    if error is not None:
        fail(call, f"{type(error).__name__}: {error}", f"the results of all {world} ranks")
    if len(results) != world or any(result is None for result in results):
        fail(call, results, f"the results of all {world} ranks")
    return results


def attempt(function, *args, **kwargs):
    """Call a function; return its result and the exception that it raised instead."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


def expect(call, got, expected):
    """Fail unless `got` equals `expected`; of an array, dtype and shape must agree as well."""
    __tracebackhide__ = True
    if isinstance(expected, np.ndarray):
        same_kind = isinstance(got, np.ndarray) and got.dtype == expected.dtype
        equal = same_kind and np.array_equal(got, expected)  # array_equal compares shapes
    else:
        equal = got == expected
    if not equal:
        fail(call, got, expected)


def fail(call, got, expected):
    __tracebackhide__ = True
    pytest.fail(f"\n  called   {call}\n  got      {show(got)}\n  expected {show(expected)}")


def show(value):
    if isinstance(value, np.ndarray):
        numbers = np.array2string(value, precision=17, threshold=40)
        return f"{value.dtype} array of shape {value.shape}: {numbers}"
    return value if isinstance(value, str) else repr(value)


def reals(rank, shape, seed):
    """float64 whose sum depends on the order; they differ per rank, index and seed."""
    return np.random.default_rng([seed, rank]).standard_normal(shape)


def wholes(rank, shape, seed):
    """Whole numbers as float64, never 0, different likewise: every order has the same sum."""
    return np.random.default_rng([seed, rank]).integers(1, 10**9, shape).astype(np.float64)


def is_fresh(result, argument):
    """Whether a result can be written to and shares no memory with the argument."""
    return result.flags.writeable and not np.shares_memory(result, argument)


def raised(function, *args, **kwargs):
    """What a call raised: "ValueError" (a subclass will do), or what happened instead."""
    _, error = attempt(function, *args, **kwargs)
    return "ValueError" if isinstance(error, ValueError) else repr(error)


@pytest.fixture(autouse=True)
def _end_leftover_ranks():
    """End what a faulty spawn leaves running, so that pytest itself can finish."""
    before = set(multiprocessing.active_children())
    yield
    for child in set(multiprocessing.active_children()) - before:
        child.kill()


# 1. The worked example


def hand_example(comm: Comm):
    x = np.array([1.0, 2.0, 3.0]) * 10.0**comm.rank
    sent = [comm.bytes_sent]
    chunk = comm.reduce_scatter(x)
    sent.append(comm.bytes_sent)
    gathered = comm.all_gather(chunk)
    sent.append(comm.bytes_sent)
    total = comm.all_reduce(x)
    sent.append(comm.bytes_sent)
    return comm.rank, comm.world, chunk, gathered, total, sent


def test_hand_example_ring_allreduce():
    """Section 3: the chunks, the sums, 16 bytes after one half and 32 after both."""
    expect("chunk_bounds(3, 3)", chunk_bounds(3, 3), [(0, 1), (1, 2), (2, 3)])
    sums = np.array([111.0, 222.0, 333.0])
    for r, (rank, world, chunk, gathered, total, sent) in enumerate(run(hand_example, 3)):
        expect(f"comm.rank, comm.world on rank {r}", (rank, world), (r, 3))
        expect(f"reduce_scatter(x_{r}) on rank {r}", chunk, sums[r : r + 1])
        expect(f"all_gather(chunk {r}) on rank {r}", gathered, sums)
        expect(f"all_reduce(x_{r}) on rank {r}", total, sums)
        when = "at first, after reduce_scatter, after all_gather, after all_reduce"
        expect(f"comm.bytes_sent on rank {r} {when}", sent, [0, 16, 32, 64])


# 2. Chunks


def test_chunk_bounds():
    """The sizes of numpy.array_split for n < 23 and p <= 5."""
    for n, p in itertools.product(range(23), range(1, 6)):
        parts = np.array_split(np.arange(n), p)
        stops = np.cumsum([part.size for part in parts]).tolist()
        expected = list(itertools.pairwise([0, *stops]))
        expect(f"chunk_bounds({n}, {p})", chunk_bounds(n, p), expected)
    for n, p in [(3, 0), (3, -1), (-1, 3)]:
        expect(f"chunk_bounds({n}, {p})", raised(chunk_bounds, n, p), "ValueError")


# 3. All-reduce


def reduce_reals(comm: Comm, shape):
    evidence = {}
    for seed, op in enumerate(["sum", "mean"]):
        x = reals(comm.rank, shape, seed)
        before = x.copy()
        result = comm.all_reduce(x, op=op)
        evidence[op] = result, np.array_equal(x, before), is_fresh(result, x)
    return evidence, raised(comm.all_reduce, np.ones(shape), op="median")


def test_allreduce_matches_numpy_sum():
    """35 entries: numpy's sum and mean to rounding, the same bits everywhere, input untouched."""
    for p in (2, 3, 4):
        expect_numpy_sum(p, shape=(5, 7))


def expect_numpy_sum(p, shape):
    __tracebackhide__ = True
    evidence = run(reduce_reals, p, shape)
    for seed, (op, combine) in enumerate([("sum", np.sum), ("mean", np.mean)]):
        expected = combine([reals(rank, shape, seed) for rank in range(p)], axis=0)
        first, _, _ = evidence[0][0][op]
        for rank, (by_op, _) in enumerate(evidence):
            call = f'all_reduce(x, "{op}") on rank {rank} of {p}'
            result, untouched, fresh = by_op[op]
            expect(f"{call}, its shape and dtype", (result.shape, result.dtype), (shape, "f8"))
            if not np.allclose(result, expected, rtol=1e-12, atol=1e-12):
                fail(call, result, expected)
            if result.tobytes() != first.tobytes():
                fail(call, result, f"the bits that rank 0 holds, {show(first)}")
            expect(f"{call}: is x still what it was?", untouched, True)
            expect(f"{call}: is the result fresh and writable?", fresh, True)
    for _, error in evidence:
        expect('all_reduce(x, "median")', error, "ValueError")


# 4. Bytes


def count_bytes(comm: Comm, n):
    x = reals(comm.rank, n, seed=n)
    sent = [comm.bytes_sent]
    comm.all_reduce(x)
    sent.append(comm.bytes_sent)
    comm.all_reduce(x, op="mean")
    sent.append(comm.bytes_sent)
    chunk = comm.reduce_scatter(x)
    sent.append(comm.bytes_sent)
    comm.all_gather(chunk)
    sent.append(comm.bytes_sent)
    return np.diff(sent).tolist()


def test_bytes_moved_is_2_p_minus_1_over_p():
    """Exactly 2 (p - 1) n beta / p bytes a rank, one half of them in each half."""
    n, beta = 2000, 8
    for p in (2, 4, 5):  # all divide n, so the chunks are equal and every rank sends the same
        half = (p - 1) * n * beta // p
        for rank, sent in enumerate(run(count_bytes, p, n)):
            calls = "all_reduce, all_reduce mean, reduce_scatter, all_gather"
            call = f"{calls} of {n} float64 on rank {rank} of {p}: bytes sent by each"
            expect(call, sent, [2 * half, 2 * half, half, half])


# 5. The two halves

SHAPES = [(11,), (1,), (2, 5)]  # neither 3 nor 4 divides any; with 1 entry, chunks are empty


def own_part(rank, world, seed):
    """What a rank brings to an all_gather of unequal parts: fewer entries the higher its rank."""
    return wholes(rank, (world - 1 - rank, 2), seed)


def halves(comm: Comm):
    gathered = [comm.all_gather(own_part(comm.rank, comm.world, seed)) for seed in (10, 11)]
    rounds = []
    for seed, shape in enumerate(SHAPES):
        x = wholes(comm.rank, shape, seed)
        before = x.copy()
        chunk = comm.reduce_scatter(x)
        whole = comm.all_gather(chunk)
        fresh = is_fresh(chunk, x) and is_fresh(whole, chunk)
        rounds.append((chunk, whole, np.array_equal(x, before), fresh))
    return gathered, rounds


def test_reduce_scatter_and_all_gather():
    """Each half on its own, with chunks of unequal sizes and empty ones."""
    for p in (3, 4):
        expect_halves(p)


def expect_halves(p):
    __tracebackhide__ = True
    for rank, (gathered, rounds) in enumerate(run(halves, p)):
        on_rank = f"on rank {rank} of {p}"
        for seed, got in zip((10, 11), gathered, strict=True):
            parts = [own_part(r, p, seed).reshape(-1) for r in range(p)]
            sizes = [part.size for part in parts]
            expect(f"all_gather of parts of {sizes} {on_rank}", got, np.concatenate(parts))
        for seed, (shape, evidence) in enumerate(zip(SHAPES, rounds, strict=True)):
            chunk, whole, untouched, fresh = evidence
            total = np.sum([wholes(r, shape, seed) for r in range(p)], axis=0).reshape(-1)
            own = np.array_split(total, p)[rank]
            expect(f"reduce_scatter of shape {shape} {on_rank}", chunk, own)
            expect(f"all_gather of the chunks of {shape} {on_rank}", whole, total)
            expect(f"reduce_scatter {on_rank}: is x still what it was?", untouched, True)
            expect(f"the halves {on_rank}: are the results fresh, writable?", fresh, True)


# 6. Broadcast


def broadcast_from_all(comm: Comm, shape):
    rounds = []
    for src in range(comm.world):
        x = wholes(comm.rank, shape, seed=src)
        before, sent = x.copy(), comm.bytes_sent
        got = comm.broadcast(x, src)
        sent = comm.bytes_sent - sent
        rounds.append((got, sent, np.array_equal(x, before), is_fresh(got, x)))
    return rounds, exchange_with_all(comm)


def exchange_with_all(comm: Comm):
    """One message over every channel in each direction; return what came, by source."""
    received = {}
    for src, dst in itertools.permutations(range(comm.world), 2):
        if comm.rank == src:
            comm.send(wholes(src, 4, seed=100 + dst), dst)
        elif comm.rank == dst:
            received[src] = comm.recv(src)
    return received


def test_broadcast_from_every_src():
    """Every source, the bytes of every rank, and no message left in any channel afterwards."""
    for p in (2, 3):
        expect_broadcasts(p, shape=(3, 5))


def expect_broadcasts(p, shape):
    __tracebackhide__ = True
    for rank, (rounds, received) in enumerate(run(broadcast_from_all, p, shape)):
        for src, (got, sent, untouched, fresh) in enumerate(rounds):
            call = f"broadcast(x, src={src}) on rank {rank} of {p}"
            expect(call, got, wholes(src, shape, seed=src))
            nbytes = 0 if rank == (src - 1) % p else got.nbytes
            expect(f"{call}: bytes sent", sent, nbytes)
            expect(f"{call}: is x still what it was?", untouched, True)
            expect(f"{call}: is the result fresh and writable?", fresh, True)
        for src, got in received.items():
            call = f"recv({src}) on rank {rank} of {p}, after the broadcasts"
            expect(call, got, wholes(src, 4, seed=100 + rank))


# 7. Deadlock


def large_messages(comm: Comm):
    chunk_size = MIB // 8
    i = np.arange(1.0, comm.world * chunk_size + 1)
    x = (comm.rank + 1) * i + comm.rank  # over three ranks: 6 i + 3
    reduced = comm.all_reduce(x)
    chunk = comm.reduce_scatter(-x)  # other numbers, lest the first call's leftovers pass
    whole = comm.all_gather(chunk)
    copied = comm.broadcast(x, 1)
    own = slice(comm.rank * chunk_size, (comm.rank + 1) * chunk_size)
    sums = 6 * i + 3  # only now that all results are in
    return [
        np.array_equal(reduced, sums),
        np.array_equal(chunk, -sums[own]),
        np.array_equal(whole, -sums),
        np.array_equal(copied, 2 * i + 1),
    ]


def test_large_messages_do_not_deadlock():
    """A ring of 3 with chunks of 1 MiB: some five times what a pipe takes with no reader."""
    for rank, right in enumerate(run(large_messages, 3, timeout=HANG)):
        calls = "all_reduce, reduce_scatter, all_gather, broadcast"
        expect(f"{calls} of 3 MiB on rank {rank}: right values?", right, [True] * 4)


# 8. Send and receive

KINDS = list(
    zip(
        ["f8", "f4", "f2", "i8", "i4", "i1", "u1", "u2", "c16", "f8", "f8"],
        [(7,), (2, 3), (1, 1, 5), (), (4, 1), (9,), (2, 2, 2), (3,), (2, 2), (0, 4), ()],
        strict=True,
    )
)


def letters(src, dst):
    """What src sends to dst: an array of each kind, and one that is not contiguous."""
    rng = np.random.default_rng([src, dst])
    arrays = [np.asarray(rng.integers(1, 100, shape)).astype(dtype) for dtype, shape in KINDS]
    return [*arrays, wholes(src, (4, 6), seed=dst).T[::2]]


def send_letters(comm: Comm):
    received, sent = {}, {}
    for src, dst in itertools.permutations(range(comm.world), 2):
        if comm.rank == src:
            before = comm.bytes_sent
            for x in letters(src, dst):
                comm.send(x, dst)
                x[...] = 0  # the message is a copy, so this must not reach dst
            sent[dst] = comm.bytes_sent - before
        elif comm.rank == dst:
            received[src] = [comm.recv(src) for _ in letters(src, dst)]
    writable = all(x.flags.writeable for arrays in received.values() for x in arrays)
    before = comm.bytes_sent
    errors = {}
    for other in (-1, comm.world, comm.rank):
        errors[f"send(x, {other})"] = raised(comm.send, np.ones(3), other)
        errors[f"recv({other})"] = raised(comm.recv, other)
    errors["bytes sent by those"] = comm.bytes_sent - before
    return received, sent, writable, errors, exchange_with_all(comm)


def test_send_recv_point_to_point():
    """Order, dtype, shape, a writable copy; ValueError for a rank that is none, or oneself."""
    for rank, (received, sent, writable, errors, later) in enumerate(run(send_letters, 3)):
        for src, arrays in received.items():
            for i, (got, expected) in enumerate(zip(arrays, letters(src, rank), strict=True)):
                expect(f"recv({src}) on rank {rank}, message {i}", got, expected)
        for dst, nbytes in sent.items():
            expected = sum(x.nbytes for x in letters(rank, dst))
            expect(f"send to {dst} from rank {rank}, all messages: bytes", nbytes, expected)
        expect(f"recv on rank {rank}: can every array be written to?", writable, True)
        for call, outcome in errors.items():
            expected = 0 if call.startswith("bytes") else "ValueError"
            expect(f"{call} on rank {rank} of 3", outcome, expected)
        for src, got in later.items():
            call = f"recv({src}) on rank {rank}, after the refused calls"
            expect(call, got, wholes(src, 4, seed=100 + rank))


# 9. Failure


class LostGradientError(Exception):
    """Pickles but does not unpickle: its two arguments are not in `args`."""

    def __init__(self, layer, reason):
        super().__init__(f"layer {layer}: {reason}")


def lose_the_gradient():
    raise LostGradientError(7, "not a number")


def crash_while_others_return(comm: Comm):
    if comm.rank == 1:
        lose_the_gradient()
    return comm.rank


def crash_while_others_wait(comm: Comm):
    if comm.rank == 1:
        lose_the_gradient()
    if comm.rank == 0:
        comm.recv(1)  # waits for a message that nobody will send
    time.sleep(60)


def oversleep(comm: Comm):
    time.sleep(60)


def living_children():
    """The processes that still run; those that are just being ended get a moment to go."""
    patience = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < patience:
        time.sleep(0.02)
    return multiprocessing.active_children()


def expect_failure(worker, world, timeout, kind):
    """Spawn a worker that fails; expect that kind of exception, soon, and no process left."""
    __tracebackhide__ = True
    call = f"spawn({worker.__name__}, world={world}, timeout={timeout})"
    started = time.monotonic()
    results, error = attempt(spawn, worker, world, timeout=timeout)
    seconds = time.monotonic() - started
    if not isinstance(error, kind):
        fail(call, results if error is None else repr(error), f"a {kind.__name__}")
    if seconds > 10:
        fail(call, f"{error!r} after {seconds:.1f} s", "it within 10 s, while others sleep 60")
    expect(f"{call}: processes that still run", living_children(), [])
    return call, str(error)


def test_rank_error_propagates():
    """A crash on rank 1 raises its traceback here, soon, whatever the other ranks wait for."""
    for worker, world in [(crash_while_others_return, 2), (crash_while_others_wait, 3)]:
        call, message = expect_failure(worker, world, START, RuntimeError)
        for part in [
            "Traceback",
            "lose_the_gradient",
            "LostGradientError",
            "layer 7: not a number",
        ]:
            if part not in message:
                fail(call, message, f"a message with {part!r}")
        if not re.search(r"rank\W*1\b", message, re.IGNORECASE):
            fail(call, message, 'a message that names "rank 1"')
    expect_failure(oversleep, 2, 0.5, TimeoutError)


# 10. Barrier


def wait_for_late_rank(comm: Comm, pause):
    """Each rank in turn comes late to a barrier; a second barrier follows at once."""
    rounds = []
    sent = 0
    for late in range(comm.world):
        if comm.rank == late:
            for other in set(range(comm.world)) - {late}:
                comm.recv(other)  # from here on the others stand before the barrier, or in it
            time.sleep(pause)
        else:
            comm.send(np.array([comm.rank]), late)
        before = comm.bytes_sent
        for _ in range(2):
            arrived = time.monotonic()
            comm.barrier()
            rounds.append((arrived, time.monotonic()))
        sent += comm.bytes_sent - before
    return rounds, sent


def test_barrier():
    """No rank leaves before the last one has arrived, whichever comes late."""
    evidence = run(wait_for_late_rank, 3, 0.2)
    # time.monotonic is one clock for all processes of a machine.
    for i, times in enumerate(zip(*(rounds for rounds, _ in evidence), strict=True)):
        late, second = divmod(i, 2)
        call = f"barrier() with rank {late} late" + (", the next one" if second else "")
        last_arrival = max(arrived for arrived, _ in times)
        for rank, (_, left) in enumerate(times):
            if left < last_arrival:
                gap = f"{last_arrival - left:.3f} s"
                fail(call, f"rank {rank} leaves {gap} before the last arrives", "it to wait")
    expect("barrier(): payload bytes sent by each rank", [sent for _, sent in evidence], [0] * 3)
