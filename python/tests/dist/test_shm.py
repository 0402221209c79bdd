"""Shared memory: bits and bytes, symmetric arrays, where memory ends, how ranks wait and end."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
import time
from hashlib import sha256

import numpy as np
import pytest
import test_conformance
from dist_worlds import bytes_of, data, ring_sum, shared_bytes

from tinyllm.dist import CommError, DesyncError, RankDied, RankError, segment, shm
from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh, spawn
from tinyllm.dist.segment import TRAY
from tinyllm.dist.shm import CROWDED, ONE_SHOT, shm_mesh

FIXED = ["f8", "f4", "f2", "c16", "i1", "u8"]


def run(fn, world: int, *args, mesh=shm_mesh, **options):
    return spawn(fn, world, *args, mesh=mesh, method="forkserver", **options)


@pytest.fixture(scope="module", autouse=True)
def _fork_server():
    """Start it outside the test that counts descriptors: one stays open for the server."""
    run(only_starts, 1)


def only_starts(comm: Comm) -> None: ...


@pytest.fixture(autouse=True)
def nothing_is_left_in_memory():
    yield
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    assert not [name for name in names if "tinyllm" in name or "symmetric" in name]


# -- bits and bytes --------------------------------------------------------------------------------


@pytest.fixture(params=["crowded", "roomy"])
def _cores(request, monkeypatch) -> None:
    """More ranks than cores, or fewer: the ranks wait and add up in other ways."""
    monkeypatch.setattr(shm, "cores", lambda: 1 if request.param == "crowded" else 64)


def edges(world: int) -> list[int]:
    """Entries of 8 bytes at which the way changes, or the number of pieces."""
    piece = TRAY // 8 // world * world
    return [limit // 8 + more for limit in (ONE_SHOT, CROWDED, 8 * piece) for more in (0, 1)]


def digest(comm: Comm) -> str:
    """What all operations return, at all edges and in all dtypes that have no padding."""
    seen = sha256()
    piece = TRAY // 8 // comm.world * comm.world
    sizes = [(n, "f8") for n in (0, 1, 2, 3, comm.world, 35, *edges(comm.world), 2 * piece + 1)]
    for n, dtype in [*sizes, *((n, dtype) for n in (5, 20_001) for dtype in FIXED)]:
        x = data(comm.rank, n, dtype)
        out = np.empty_like(x)
        for _ in range(2):  # the second time the kind is known
            before = comm.bytes_sent
            seen.update(comm.all_reduce(x, out=out).tobytes())
            assert comm.bytes_sent - before == bytes_of(comm, "all_reduce", n, x.itemsize)
            x = np.roll(x, 1)
        before = comm.bytes_sent
        seen.update(comm.reduce_scatter(x).tobytes())
        assert comm.bytes_sent - before == bytes_of(comm, "reduce_scatter", n, x.itemsize)
        seen.update(comm.all_gather(x[comm.rank :]).tobytes())
        seen.update(comm.broadcast(x, n % comm.world).tobytes())
        if x.dtype.kind in "fc":
            seen.update(comm.all_reduce(x, "mean").tobytes())
            seen.update(comm.all_reduce(x, "mean", out=x).tobytes())
    return seen.hexdigest()


@pytest.mark.usefixtures("_cores")
@pytest.mark.parametrize("world", [2, 5])
def test_the_bits_are_those_of_the_pipes(world: int) -> None:
    assert run(digest, world) == run(digest, world, mesh=pipe_mesh)


def not_numbers(comm: Comm) -> bytes:
    """NaNs of both signs on all ranks: of two NaNs the first survives an addition."""
    got = []
    for n in (2, 16, 5000, 100_001):
        x = np.where((np.arange(n) + comm.rank) % 2, np.nan, -np.nan)
        got.append(comm.all_reduce(x).tobytes())
    return b"".join(got)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_hold_the_same_not_a_numbers(world: int) -> None:
    assert len(set(run(not_numbers, world))) == 1


def hurried_and_slow(comm: Comm, seed: int) -> None:
    """Any operations on any arrays, by ranks that dawdle before and after they meet."""
    chance, mine, meet = random.Random(seed), random.Random(comm.rank), comm._table.meet

    def dawdle(*args) -> None:
        time.sleep(mine.choice([0, 0, 0, 2e-4]))
        meet(*args)
        time.sleep(mine.choice([0, 0, 0, 1e-3]))

    comm._table.meet = dawdle
    most = TRAY // 8 + 5
    room = np.empty(2 * most)  # x and out lie in it where chance puts them, and may overlap
    shared = comm.empty(most)
    for step in range(60):
        n = chance.choice([3, 300, 1025, 5000, 30_000, most])
        parts = [data(rank, n) * (step + 1) for rank in range(comm.world)]
        at, to = chance.randint(0, most), chance.choice([0, 1, n // 2, most])
        x, out = room[at : at + n], room[to : to + n]
        if chance.random() < 0.3:  # on some ranks, or all, symmetric
            out = shared[:n] if comm.rank >= chance.choice([0, 0, 0, 1]) else out
            x = chance.choice([x, out])
        x[:] = parts[comm.rank]
        kind = chance.choice(["all_reduce"] * 3 + ["reduce_scatter", "all_gather", "broadcast"])
        if kind == "all_reduce":
            expected = ring_sum(parts)
            got = comm.all_reduce(x, out=out)
            assert got is out
        elif kind == "reduce_scatter":
            start, stop = chunk_bounds(n, comm.world)[comm.rank]
            expected = ring_sum(parts)[start:stop]
            got = comm.reduce_scatter(x, out=out[: stop - start])
        elif kind == "all_gather":
            expected = np.concatenate(parts)
            got = comm.all_gather(x)
        else:
            expected = parts[step % comm.world]
            got = comm.broadcast(x, step % comm.world, out=out)
        assert np.array_equal(got, expected), (step, kind, n, at, to)


@pytest.mark.usefixtures("_cores")
@pytest.mark.parametrize("world", [2, 3])
def test_nobody_reads_too_early_or_writes_too_early(world: int) -> None:
    run(hurried_and_slow, world, world)


# -- kinds of arrays that were seen before ---------------------------------------------------------


def refusals(comm: Comm) -> list[str]:
    """What is refused is refused also when its kind is known, and breaks nothing."""
    said = []
    for n in (10, 20_000):
        x, out = data(comm.rank, n), np.empty(n)
        fixed = np.empty(n)
        fixed.flags.writeable = False
        wrong = [
            lambda x=x, fixed=fixed: comm.all_reduce(x, out=fixed),
            lambda x=x, n=n: comm.all_reduce(x, out=np.empty((1, n))),
            lambda x=x, n=n: comm.all_reduce(x, out=np.empty(n, "f4")),
            lambda x=x, out=out: comm.all_reduce(x, ["sum"], out=out),
            lambda x=x, out=out: comm.all_reduce(x, "max", out=out),
            lambda x=x, out=out: comm.all_reduce(np.ma.masked_array(x), out=out),
            lambda x=x, out=out: comm.all_reduce(x, out=np.ma.masked_array(out)),
            lambda x=x, out=out: comm.all_reduce(x, out=list(out)),
        ]
        for _ in range(2):
            assert comm.all_reduce(x, out=out) is out
        for call in wrong:
            with pytest.raises((TypeError, ValueError), match=r"^all_reduce: ") as caught:
                call()
            said.append(str(caught.value))
        parts = [data(rank, n) for rank in range(comm.world)]
        for to in (np.empty(2 * n)[::2], np.empty(n)):
            assert np.array_equal(comm.all_reduce(x, out=to), ring_sum(parts))
        assert np.array_equal(comm.all_reduce(np.repeat(x, 2)[::2], out=out), ring_sum(parts))
    return said


def test_what_is_refused_is_refused_of_known_kinds_too() -> None:
    assert [len(set(said)) for said in run(refusals, 2)] == [9] * 2  # one names the shape


def many_kinds(comm: Comm) -> int:
    """More than are remembered, all of them right, and the first ones again."""
    for n in [*range(1, 600), 1, 2, 3]:
        out = np.empty(n)
        comm.all_reduce(np.full(n, float(comm.rank + n)), out=out)
        assert np.array_equal(out, np.full(n, 1 + 2.0 * n)), n
    ways = (comm._one_shot, comm._two_shot)
    return max(len(comm._at_hand), *(way.cache_info().currsize for way in ways))


def test_not_more_kinds_are_remembered_than_is_said() -> None:
    assert max(run(many_kinds, 2)) == 256


def differs_in_the_end(comm: Comm, n: int) -> str:
    x, out = np.ones(n), np.ones(n)
    for _ in range(3):
        comm.all_reduce(x, out=out)
    with pytest.raises(DesyncError) as caught:
        comm.all_reduce(x, "mean" if comm.rank == 2 else "sum", out=out)
    with pytest.raises(CommError, match=r"broken since all_reduce #4 .* failed"):
        comm.all_reduce(x, out=out)
    return str(caught.value)


@pytest.mark.parametrize("n", [3, 20_000])
def test_ranks_that_disagree_about_known_kinds_are_told_so(n: int) -> None:
    for said in run(differs_in_the_end, 3, n):
        assert f"rank 2: all_reduce #4 (float64[{n}], mean)" in said


# -- symmetric arrays ------------------------------------------------------------------------------


def symmetric(comm: Comm) -> None:
    for dtype in FIXED:
        for n in (0, 1, 7, 5000, 100_003):
            parts = [data(rank, n, dtype) for rank in range(comm.world)]
            a = comm.empty(n, dtype)
            assert a.shape == (n,) and a.dtype == dtype and a.flags.writeable
            for op in ("sum", "mean") if a.dtype.kind in "fc" else ("sum",):
                private = comm.all_reduce(parts[comm.rank], op)
                a[:] = parts[comm.rank]
                before = comm.bytes_sent
                assert comm.all_reduce(a, op, out=a) is a
                assert comm.bytes_sent - before == pushed(comm, a)
                assert a.tobytes() == private.tobytes(), (dtype, n, op)
                a[:] = 0  # and from elsewhere into it
                comm.all_reduce(parts[comm.rank], op, out=a)
                assert a.tobytes() == private.tobytes(), (dtype, n, op)


def pushed(comm: Comm, a: np.ndarray) -> int:
    """Bytes that a rank writes for others: all of a small array, or its chunk to each of them."""
    if a.nbytes <= comm._small:
        return a.nbytes
    start, stop = chunk_bounds(a.size, comm.world)[comm.rank]
    return (comm.world - 1) * (stop - start) * a.itemsize


def private(comm: Comm, a: np.ndarray) -> int:
    """The same where it is not symmetric, or not on all ranks."""
    return shared_bytes(comm, a.size, a.itemsize)


@pytest.mark.parametrize("world", [2, 5])
def test_symmetric_arrays_are_added_up_where_they_lie(world: int) -> None:
    run(symmetric, world)


def views(comm: Comm) -> None:
    a, b = comm.empty((200, 300)), comm.empty(60_000)
    base = [data(rank, (200, 300)) for rank in range(comm.world)]
    whole = ring_sum(base)

    def bytes_for(x, out) -> int:
        before = comm.bytes_sent
        comm.all_reduce(x, out=out)
        return comm.bytes_sent - before

    for rows in (slice(None), slice(50), slice(7, 190)):
        a[:] = base[comm.rank]
        expected = ring_sum([part[rows] for part in base])
        assert bytes_for(a[rows], a[rows]) == pushed(comm, a[rows])
        assert np.array_equal(a[rows], expected)
    a[:] = base[comm.rank]
    assert bytes_for(a.reshape(-1), b) == pushed(comm, b) and np.array_equal(b, whole.reshape(-1))
    assert np.array_equal(a, base[comm.rank]), "the input changed"
    # What not all ranks have in the same place, or not in one piece, goes the private way.
    a[:] = 0
    comm.all_reduce(a, out=a)
    a[:] = base[comm.rank]
    mine = a if comm.rank else a.copy()
    assert bytes_for(mine, mine) == private(comm, a) and np.array_equal(mine, whole)
    a[:] = base[comm.rank]
    shifted = a[comm.rank : comm.rank + 150]
    expected = ring_sum([base[rank][rank : rank + 150] for rank in range(comm.world)])
    assert bytes_for(shifted, shifted) == private(comm, shifted)
    assert np.array_equal(shifted, expected)
    a[:] = base[comm.rank]
    assert bytes_for(a[:, ::2], a[:, ::2]) == private(comm, a[:, ::2])
    assert np.array_equal(a[:, ::2], ring_sum([part[:, ::2].copy() for part in base]))
    b[:] = np.arange(60_000) + comm.rank
    expected = ring_sum([np.arange(50_000.0) + rank for rank in range(comm.world)])
    comm.all_reduce(b[:50_000], out=b[1:50_001])  # they overlap, shifted by one
    assert np.array_equal(b[1:50_001], expected)
    flat = a.reshape(-1)
    del a
    flat[:] = base[comm.rank].reshape(-1)
    assert bytes_for(flat, flat) == pushed(comm, flat) and np.array_equal(flat, whole.reshape(-1))


def test_views_of_symmetric_arrays() -> None:
    run(views, 3)


def mapped_symmetric() -> int:
    with open("/proc/self/maps") as maps:
        return sum("symmetric" in line for line in maps)


def come_and_go(comm: Comm) -> list[int]:
    kept = comm.empty(10)
    counts, fds = [], len(os.listdir("/dev/fd"))
    for _ in range(3):
        a = comm.empty(100_000)
        part = a[10:]
        counts.append(mapped_symmetric())
        del a
        counts.append(mapped_symmetric())
        del part
        counts.append(mapped_symmetric())
    assert len(os.listdir("/dev/fd")) == fds
    kept[:] = comm.rank
    return counts


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux shows what is mapped")
def test_symmetric_arrays_go_with_their_last_view() -> None:
    assert run(come_and_go, 2) == [[2, 2, 1] * 3] * 2


def empty_elsewhere(comm: Comm) -> None:
    if comm.rank == 0:  # no collective there
        a = comm.empty((2, 3), "f4")
        assert a.shape == (2, 3) and a.dtype == np.float32


def test_on_other_meshes_it_is_an_array_like_any() -> None:
    run(empty_elsewhere, 2, mesh=pipe_mesh)
    run(empty_elsewhere, 1)


def makes_another(comm: Comm) -> None:
    comm.empty(5 + (comm.rank == 2))


def makes_one_alone(comm: Comm) -> None:
    comm.empty(5) if comm.rank == 2 else comm.barrier()


@pytest.mark.parametrize("fn", [makes_another, makes_one_alone])
def test_ranks_that_make_different_arrays_are_told_so(fn) -> None:
    with pytest.raises(DesyncError, match=r"rank 2: empty #1 \(float64") as caught:
        run(fn, 4)
    assert caught.value.rank in (2, None)  # None: it was noticed when only two were there


# -- no memory -------------------------------------------------------------------------------------


@pytest.fixture
def _small_files():
    """No file may be longer than a megabyte, as if there were no more memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_small_files")
def test_a_segment_without_room_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="no room for 6,294,016 bytes of shared memory") as caught:
        run(only_starts, 2)
    assert caught.value.errno == errno.EFBIG


def test_a_file_system_that_is_full(monkeypatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="shared memory: No space left on device"):
        run(only_starts, 3)


def makes_a_huge_one(comm: Comm) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    comm.empty(1 << 20)


def test_an_array_without_room_is_an_error_that_names_the_size() -> None:
    with pytest.raises(RankError, match="no room for 16,777,216 bytes of shared memory") as caught:
        run(makes_a_huge_one, 2)
    assert caught.value.rank == 0


# -- other processors ------------------------------------------------------------------------------


def elsewhere(comm: Comm, fn, *args):
    """As on a processor that keeps no order among its stores."""
    segment._ORDERED = False
    return fn(comm, *args)


def messages(comm: Comm) -> int:
    """How many messages one barrier takes."""
    count, nod = 0, comm._port.nod

    def counted(peer: int) -> None:
        nonlocal count
        count += 1
        nod(peer)

    comm._port.nod = counted
    comm.barrier()
    return count


def test_other_processors_meet_by_messages() -> None:
    assert run(elsewhere, 3, messages) == [2, 2, 2]
    assert run(messages, 3) == [0, 0, 0]


def test_on_other_processors_all_is_the_same() -> None:
    checks = len(test_conformance.CHECKS)
    assert run(elsewhere, 3, test_conformance.run_all, "shm") == [checks] * 3
    run(elsewhere, 3, views)


@pytest.mark.parametrize("fn", [makes_another, makes_one_alone])
def test_on_other_processors_ranks_that_disagree_are_told_so(fn) -> None:
    with pytest.raises(DesyncError, match=r"rank 2: empty #1 \(float64"):
        run(elsewhere, 4, fn)


# -- waiting and ending ----------------------------------------------------------------------------


def waits(comm: Comm) -> float:
    """Processor seconds that it takes to wait a second for rank 1."""
    comm.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    if comm.rank == 1:
        time.sleep(1)
    comm.barrier()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_who_waits_leaves_the_processor_alone() -> None:
    assert max(run(waits, 3)) < 0.1


def is_killed_soon(comm: Comm, delay: float, kind: str) -> None:
    a = comm.empty(400_000) if kind == "push" else np.empty(3 if kind == "one-shot" else 400_000)
    comm.barrier()
    if comm.rank == 1:
        kill = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        kill.start()
    while True:
        comm.all_reduce(a, out=a)


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_killed_at_any_moment_is_named(seed: int) -> None:
    rng = random.Random(seed)
    kind = ("one-shot", "two-shot", "push")[seed % 3]
    start = time.monotonic()
    with pytest.raises(RankDied) as caught:
        run(is_killed_soon, rng.randint(2, 4), rng.uniform(0.001, 0.05), kind)
    assert (caught.value.rank, caught.value.exitcode) == (1, -9)
    assert time.monotonic() - start < 20


def hangs_up(comm: Comm) -> str:
    """Rank 1 closes its pipes and stays: the others see it, and not at a limit."""
    if comm.rank == 1:
        for link in filter(None, comm._port._links):
            link.close()
        time.sleep(0.5)
        return ""
    start = time.monotonic()
    with pytest.raises(Exception, match="lost rank 1 in barrier #1") as caught:
        comm.barrier()
    assert time.monotonic() - start < 0.4
    return type(caught.value).__name__


def test_a_rank_that_hangs_up_is_noticed() -> None:
    assert run(hangs_up, 2) == ["PeerLost", ""]


def test_a_mesh_that_nobody_opens_is_closed_by_its_ends() -> None:
    for end in shm_mesh(3):
        end.close()
        end.close()
