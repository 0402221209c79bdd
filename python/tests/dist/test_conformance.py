"""One suite for every mesh: what each collective returns, sends, leaves alone and refuses.

A world is spawned once and runs all checks; every check gets data that differ per rank and index.
"""

from __future__ import annotations

import numpy as np
import pytest
from dist_worlds import (
    DTYPES,
    MESHES,
    OTHERS,
    WORLDS,
    bytes_of,
    data,
    in_threads,
    ring_sum,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.dist.comm import Comm, spawn

# Entries of 8 bytes: more than a link holds unread (a pipe some 550 KB, a TCP connection 1 MB).
BEYOND = 80_021
BEYOND_TCP = 140_021

# Every world over pipes.  Over other meshes, where the Comm is the same, one of each kind: alone, a
# pair, odd, even; a fork server starts them sooner.
RUNS = [("pipe", world, "spawn") for world in WORLDS]
RUNS += [(mesh, world, "forkserver") for mesh in OTHERS for world in (1, 2, 3, 4)]


def sizes(world: int) -> tuple[int, ...]:
    """Empty; fewer entries than ranks; uneven; chunks that outgrow the pipe."""
    return 0, 1, 7, 35, BEYOND * world + 1


def everyones(comm: Comm, shape, dtype="f8") -> list[np.ndarray]:
    return [data(rank, shape, dtype) for rank in range(comm.world)]


def check_all_reduce(comm: Comm) -> None:
    for n in sizes(comm.world):
        parts = everyones(comm, n)
        x, expected = parts[comm.rank].copy(), ring_sum(parts)
        before = comm.bytes_sent
        got = comm.all_reduce(x)
        assert comm.bytes_sent - before == bytes_of(comm, "all_reduce", n)
        assert np.array_equal(got, expected), f"sum of {n}"
        assert np.allclose(got, np.sum(parts, axis=0), rtol=1e-12, atol=1e-12)
        assert np.array_equal(x, parts[comm.rank]), "the input changed"
        assert got.flags.writeable and not np.shares_memory(got, x)
        assert same_bits(comm, got)
        mean = comm.all_reduce(x, op="mean")
        assert np.array_equal(mean, expected / comm.world), f"mean of {n}"
        assert np.array_equal(x, parts[comm.rank]) and same_bits(comm, mean)


def check_dtypes(comm: Comm) -> None:
    for dtype in DTYPES:
        parts = everyones(comm, (3, 5), dtype)
        x = parts[comm.rank]
        gathered = comm.all_gather(x)
        assert gathered.dtype == x.dtype and np.array_equal(gathered, np.concatenate(parts, None))
        sent = comm.broadcast(x if comm.rank == 0 else None, 0)
        assert sent.dtype == x.dtype and sent.shape == (3, 5) and np.array_equal(sent, parts[0])
        if x.dtype.kind != "b":
            got = comm.all_reduce(x)
            assert got.dtype == x.dtype and got.shape == (3, 5), dtype
            assert np.array_equal(got, ring_sum(parts)), dtype
        if x.dtype.kind in "fc":
            assert comm.all_reduce(x, "mean").dtype == x.dtype, dtype


def check_halves(comm: Comm) -> None:
    for n in sizes(comm.world):
        parts = everyones(comm, n)
        x, expected = parts[comm.rank].copy(), np.array_split(ring_sum(parts), comm.world)
        before = comm.bytes_sent
        chunk = comm.reduce_scatter(x)
        assert comm.bytes_sent - before == bytes_of(comm, "reduce_scatter", n)
        assert np.array_equal(chunk, expected[comm.rank]) and chunk.flags.writeable
        assert np.array_equal(x, parts[comm.rank]), "the input changed"
        before = comm.bytes_sent
        whole = comm.all_gather(chunk)
        assert comm.bytes_sent - before == bytes_of(comm, "all_gather", n)
        assert np.array_equal(whole, np.concatenate(expected)) and whole.flags.writeable
        assert not np.shares_memory(whole, chunk) and same_bits(comm, whole)
    odd = [(rank * 5) % 7 for rank in range(comm.world)]  # sizes as no array_split has them
    got = comm.all_gather(data(comm.rank, odd[comm.rank]))
    assert np.array_equal(got, np.concatenate([data(rank, n) for rank, n in enumerate(odd)]))


def check_out(comm: Comm) -> None:
    n = BEYOND
    parts = everyones(comm, n)
    x, expected = parts[comm.rank], ring_sum(parts)
    out = np.full(n, np.nan)
    assert comm.all_reduce(x, out=out) is out and np.array_equal(out, expected)
    mean = np.full(n, np.nan)
    assert comm.all_reduce(x, "mean", out=mean) is mean
    assert np.array_equal(mean, expected / comm.world)
    itself = x.copy()
    assert comm.all_reduce(itself, out=itself) is itself and np.array_equal(itself, expected)
    strided = np.full(2 * n, -1.0)
    assert np.array_equal(comm.all_reduce(x, out=strided[::2]), expected)
    assert (strided[1::2] == -1).all()
    buffer = np.empty(n + 1)
    buffer[:n] = x
    comm.all_reduce(buffer[:n], out=buffer[1:])  # they overlap, shifted by one
    assert np.array_equal(buffer[1:], expected)
    chunks = np.array_split(expected, comm.world)
    chunk = np.full_like(chunks[comm.rank], np.nan)
    assert comm.reduce_scatter(x, out=chunk) is chunk
    assert np.array_equal(chunk, chunks[comm.rank])
    inside = x.copy()
    comm.reduce_scatter(inside, out=inside[: chunk.size])
    assert np.array_equal(inside[: chunk.size], chunk)
    whole = np.full(n, np.nan)
    assert comm.all_gather(chunk, out=whole) is whole and np.array_equal(whole, expected)
    packed = np.full(n, np.nan)
    packed[: chunk.size] = chunk  # where the first rank's goes
    comm.all_gather(packed[: chunk.size], out=packed)
    assert np.array_equal(packed, expected)
    matrix = np.asmatrix(np.zeros((3, 4)))
    assert comm.all_reduce(np.ones((3, 4)), out=matrix) is matrix and (matrix == comm.world).all()
    copy = np.full((n, 1), np.nan)
    last = comm.world - 1
    source = x.reshape(n, 1) if comm.rank == last else None
    assert comm.broadcast(source, last, out=copy) is copy
    assert np.array_equal(copy.reshape(-1), parts[last])


def check_broadcast(comm: Comm) -> None:
    for n in (0, 1, 35, BEYOND):
        for src in range(comm.world):
            x = data(comm.rank, n)
            before = comm.bytes_sent
            got = comm.broadcast(x if comm.rank == src or n == 35 else None, src)
            assert comm.bytes_sent - before == bytes_of(comm, "broadcast", n, src=src)
            assert np.array_equal(got, data(src, n)) and got.flags.writeable
            assert not np.shares_memory(got, x)
    assert comm.all_reduce(comm.rank) == sum(range(comm.world)), "a stray message"


def check_point_to_point(comm: Comm) -> None:
    rank, world = comm.rank, comm.world
    for other in range(world):  # every pair, both ways, several in order, beyond the pipe's buffer
        for n in (0, 3, BEYOND):
            if other == rank:
                continue
            x = data(rank * world + other, (n, 2), "f4")
            before = comm.bytes_sent
            if rank < other:
                comm.send(x, other)
                comm.send(x[:1] + 1, other)
                got, second = comm.recv(other), comm.recv(other)
            else:
                got, second = comm.recv(other), comm.recv(other)
                comm.send(x, other)
                comm.send(x[:1] + 1, other)
            assert comm.bytes_sent - before == x.nbytes + x[:1].nbytes
            expected = data(other * world + rank, (n, 2), "f4")
            assert got.dtype == x.dtype and np.array_equal(got, expected)
            assert np.array_equal(second, expected[:1] + 1)
            got += 1  # its own memory, writable


def check_forms(comm: Comm) -> None:
    base = data(comm.rank, (6, 8))
    read_only = base.copy()
    read_only.flags.writeable = False
    forms = {
        "strided": base[::2, 1::3],
        "reversed": base[::-1, ::-1],
        "transposed": base.T,
        "Fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0], (4, 8)),
        "read-only": read_only,
        "0-d": np.array(comm.rank + 0.25),
        "scalar": np.float32(comm.rank + 0.5),
        "empty (0, 3)": np.empty((0, 3)),
        "empty (3, 0)": np.empty((3, 0), np.float32),
        "foreign byte order": base.astype(">f8" if np.little_endian else "<f8"),
        "int": comm.rank + 3,
        "float": comm.rank + 0.5,
        "complex": comm.rank + 2j,
        "list": [[comm.rank, 2], [3, 4]],
        "63 dimensions": np.full((1,) * 63, comm.rank + 1.0),
    }
    for name, x in forms.items():
        native = np.asarray(x).astype(np.asarray(x).dtype.newbyteorder("="))
        before = native.copy()
        got = comm.all_reduce(x)
        everyone = comm.all_gather(x).reshape(comm.world, *native.shape)
        assert got.shape == native.shape and got.dtype == native.dtype, name
        assert got.flags.writeable and isinstance(got, np.ndarray), name
        assert np.array_equal(got, ring_sum(list(everyone))), name
        assert np.array_equal(everyone[comm.rank], native), name
        assert np.array_equal(np.asarray(x), before), f"{name}: the input changed"
        sent = comm.broadcast(x if comm.rank == 0 else None, 0)
        assert sent.shape == native.shape and np.array_equal(sent, everyone[0]), name
        chunk = comm.reduce_scatter(x)
        assert np.array_equal(chunk, np.array_split(got.reshape(-1), comm.world)[comm.rank]), name


def check_not_finite(comm: Comm) -> None:
    x = np.array([1.0, np.nan if comm.rank == comm.world - 1 else 2.0, np.inf, 4.0, -np.inf])
    got = comm.all_reduce(x)
    assert np.isnan(got[1]) and got[2] == np.inf and got[4] == -np.inf
    assert got[0] == comm.world and same_bits(comm, got)
    half = comm.all_reduce(np.full(9, 60_000, np.float16), "mean")  # the sum would be inf
    assert np.allclose(half.astype(float), 60_000, rtol=2e-3)


def check_refusals(comm: Comm) -> None:
    before = comm.bytes_sent
    n, rank, world = 4, comm.rank, comm.world
    x = data(rank, n)
    strange = [np.array([object()]), np.array(["a"]), np.array(["2026-01-01"], "M8[D]")]
    strange.append(np.zeros(2, [("a", "f8")]))
    for bad in strange:
        for call in (comm.all_reduce, comm.reduce_scatter, comm.all_gather):
            with pytest.raises(TypeError, match="no number type"):
                call(bad)
        with pytest.raises(TypeError, match="no number type"):
            comm.broadcast(bad, 0)
    for bad in (None, {}, 2**70, (i for i in range(3))):
        with pytest.raises(TypeError, match="is no array of numbers; pass a numpy array"):
            comm.all_reduce(bad)
    with pytest.raises(ValueError, match="all_reduce: this list is no array"):
        comm.all_reduce([[1, 2], [3]])
    with pytest.raises(ValueError, match="all_reduce: op="):
        comm.all_reduce(x, x)
    with pytest.raises(TypeError, match="masked"):
        comm.all_reduce(np.ma.masked_equal(x, x[0]))
    with pytest.raises(TypeError, match="bools"):
        comm.all_reduce(x > 0)
    with pytest.raises(TypeError, match="mean of int64"):
        comm.all_reduce(np.arange(3), "mean")
    with pytest.raises(ValueError, match="'max'"):
        comm.all_reduce(x, "max")
    for src in (world, -1):
        with pytest.raises(ValueError, match=f"rank {rank}: broadcast: src={src}"):
            comm.broadcast(x, src)
    for src in (True, 0.0, "0", None):
        with pytest.raises(TypeError, match="not an integer"):
            comm.broadcast(x, src)
    for other in (rank, world, -1):
        with pytest.raises(ValueError, match=f"rank {rank}: send: dst={other}"):
            comm.send(x, other)
        with pytest.raises(ValueError, match=f"rank {rank}: recv: src={other}"):
            comm.recv(other)
    assert comm.bytes_sent == before
    assert comm.all_reduce(1) == world, "a refused call left something behind"


def check_refusals_of_out(comm: Comm) -> None:
    before, n = comm.bytes_sent, 4
    x = data(comm.rank, n)
    for out, error in (
        (np.empty(n + 1), ValueError),
        (np.empty((n, 1)), ValueError),
        (np.empty(n, "f4"), TypeError),
        ([0.0] * n, TypeError),
        (np.broadcast_to(0.0, n), ValueError),
        (np.ma.zeros(n), TypeError),
    ):
        with pytest.raises(error, match="out="):
            comm.all_reduce(x, out=out)
    assert comm.bytes_sent == before
    size = n * comm.world
    gathered = np.empty(size)
    for out, error in (
        (np.empty(size + 1), ValueError),
        (np.empty(size, "f4"), TypeError),
        ([0.0] * size, TypeError),
    ):
        with pytest.raises(error, match="all_gather: out="):
            comm.all_gather(x, out=out)  # whose size only the others can tell
        if comm.rank == 0:
            with pytest.raises(error, match="all_gather: out="):
                comm.all_gather(x, out=out)
        else:
            assert comm.all_gather(x, out=gathered) is gathered
    assert comm.all_reduce(1) == comm.world, "a refused call left something behind"


def check_barrier(comm: Comm) -> None:
    before = comm.bytes_sent
    for _ in range(3):
        comm.barrier()
    assert comm.bytes_sent == before


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def run_all(comm: Comm, mesh: str) -> int:
    global BEYOND
    BEYOND = BEYOND_TCP if mesh == "tcp" else BEYOND
    for check in CHECKS:
        check(comm)
    return len(CHECKS)


@pytest.fixture(scope="module")
def _fork_server():
    """Start it outside the test that counts descriptors: one stays open for the server."""
    spawn(only_starts, 1, method="forkserver")


def only_starts(comm: Comm) -> None: ...


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize(("mesh", "world", "method"), RUNS)
def test_mesh_conforms(mesh: str, world: int, method: str) -> None:
    ran = spawn(run_all, world, mesh, mesh=MESHES[mesh], method=method)
    assert ran == [len(CHECKS)] * world


def reduce_all(comm: Comm, n: int, dtype: str, op: str) -> bytes:
    x = data(comm.rank, n, dtype)
    got = comm.all_reduce(x, op)
    assert comm.bytes_sent == bytes_of(comm, "all_reduce", n, x.itemsize)
    return got.tobytes()


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 7),
    n=st.integers(0, 90),
    dtype=st.sampled_from(["f2", "f4", "f8", "c16", "i2", "u8"]),
)
def test_any_world_and_size_gives_the_rings_sum(mesh: str, world: int, n: int, dtype: str) -> None:
    ranks = in_threads(world, reduce_all, n, dtype, "sum", mesh=MESHES[mesh])
    expected = ring_sum([data(rank, n, dtype) for rank in range(world)])
    assert ranks == [expected.tobytes()] * world
