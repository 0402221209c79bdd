"""Every algorithm of all-reduce: results, traffic to the byte, ranks that name different ones."""

from __future__ import annotations

import sys
from collections import Counter, deque
from math import ceil, log2
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from dist_worlds import (
    DTYPES,
    MESHES,
    WORLDS,
    bytes_of,
    data,
    hang_up,
    in_threads,
    ring_bytes,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.dist import CommTimeout, DesyncError, PeerLost, algorithms
from tinyllm.dist.comm import Comm, spawn

ROOT = Path(__file__).parents[3]
OURS = [*algorithms.ALGORITHMS]
ALL = [*OURS, "ring", "auto"]
BEYOND = 80_021  # entries of 8 bytes: more than a link holds unread (some 550 KB)


def core(world: int) -> int:
    """The largest power of two that is not above ``world``."""
    return 2 ** int(log2(world))


# -- what is sent, message by message, as the definitions say it -----------------------------------


def messages(algorithm: str, world: int, n: int) -> list[tuple[int, int, int]]:
    """(src, dst, entries) of every message, in no order."""
    everyone = range(world)
    if algorithm == "naive":
        return [(a, b, n) for a in everyone for b in everyone if a != b]
    if algorithm == "tree":
        up = [(rank, rank & (rank - 1), n) for rank in everyone if rank]  # without its lowest bit
        return up + [(dst, src, n) for src, dst, _ in up]
    first = core(world)
    folds = [(rank, rank - first, n) for rank in range(first, world)]
    folds += [(dst, src, n) for src, dst, _ in folds]
    if algorithm == "recursive_doubling":
        distances = [2**k for k in range(world.bit_length() - 1)]
        return folds + [(rank, rank ^ d, n) for d in distances for rank in range(first)]
    assert algorithm == "halving_doubling"
    sizes = [chunk.size for chunk in np.array_split(np.empty(n), first)]
    return folds + halves(0, sizes)


def halves(begin: int, sizes: list[int]) -> list[tuple[int, int, int]]:
    """The ranks from ``begin`` on, one for each chunk, halve these chunks and double them again."""
    half = len(sizes) // 2
    if not half:
        return []
    low, high = sum(sizes[:half]), sum(sizes[half:])
    found = halves(begin, sizes[:half]) + halves(begin + half, sizes[half:])
    for rank in range(begin, begin + half):
        found += [(rank, rank + half, high), (rank + half, rank, low)]  # to the one that keeps it
        found += [(rank, rank + half, low), (rank + half, rank, high)]  # to the one that lacks it
    return found


def bytes_sent(algorithm: str, world: int, rank: int, nbytes: int) -> int:
    """What the docstrings promise of ``rank``, for arrays of 8-byte entries."""
    n = nbytes // 8
    return 8 * sum(entries for src, _, entries in messages(algorithm, world, n) if src == rank)


# -- on every mesh, in processes -------------------------------------------------------------------


def check_all(comm: Comm) -> bool:
    for n in (0, 1, 35, 2 * BEYOND + 1):  # of which even a half outgrows a link
        parts = [data(rank, n) for rank in range(comm.world)]
        whole = [np.arange(n) * 7 + 10 ** (rank % 9) for rank in range(comm.world)]
        x, expected = parts[comm.rank].copy(), np.sum(parts, axis=0)
        for algorithm in ALL:
            about = f"{algorithm}, {n} entries, rank {comm.rank}"
            before = comm.bytes_sent
            got = algorithms.all_reduce(comm, x, algorithm=algorithm)
            sent = comm.bytes_sent - before
            name = algorithms.choice(comm.world, 8 * n) if algorithm == "auto" else algorithm
            if name == "ring":
                assert sent == bytes_of(comm, "all_reduce", n), about
            else:
                assert sent == bytes_sent(name, comm.world, comm.rank, 8 * n), about
            assert np.allclose(got, expected, rtol=1e-12, atol=1e-12), about
            assert np.array_equal(x, parts[comm.rank]), f"{about}: the input changed"
            assert got.flags.writeable and not np.shares_memory(got, x), about
            assert same_bits(comm, np.array(crc32(got))), about
            if n < BEYOND:
                mean = algorithms.all_reduce(comm, x, "mean", algorithm)
                assert np.array_equal(mean, got / comm.world) and same_bits(comm, mean), about
                total = algorithms.all_reduce(comm, whole[comm.rank], algorithm=algorithm)
                assert np.array_equal(total, np.sum(whole, axis=0)), about
    return True


# Beside shared memory there are pipes, too, for the messages that algorithms are made of.
RUNS = [(mesh, world) for mesh in MESHES for world in WORLDS if mesh != "shm" or world == 3]


@pytest.mark.parametrize(("mesh", "world"), RUNS)
def test_every_algorithm_on_every_mesh(mesh: str, world: int) -> None:
    assert all(spawn(check_all, world, mesh=MESHES[mesh], method="forkserver"))


def on_a_plain_comm(comm, expected: list[float]) -> bool:
    x = np.arange(6.0).reshape(2, 3) * (comm.rank + 1)
    for algorithm in ALL:
        got = algorithms.all_reduce(comm, x, "mean", algorithm)
        assert got.shape == (2, 3) and got.ravel().tolist() == expected, algorithm
    for algorithm in OURS:  # the contract's Comm has no out=
        out = np.empty((2, 3))
        assert algorithms.all_reduce(comm, x, algorithm=algorithm, out=out) is out
        assert out.ravel().tolist() == [3 * mean for mean in expected]
    return True


def test_a_comm_with_the_contract_alone_is_enough(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "course/wheats/L11.2"))
    import plain_comm

    assert plain_comm.spawn(on_a_plain_comm, 3, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]) == [True] * 3
    del sys.modules["plain_comm"]


# -- traffic and order -----------------------------------------------------------------------------


class Recorder:
    """As much of a Comm as an algorithm may use; it writes down what that does with it."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world = comm.rank, comm.world
        self.comm = comm
        self.events: list[tuple[str, int, int]] = []

    def send(self, x: np.ndarray, dst: int) -> None:
        self.events.append(("send", dst, x.size))
        self.comm.send(x, dst)

    def recv(self, src: int) -> np.ndarray:
        got = self.comm.recv(src)
        self.events.append(("recv", src, got.size))
        return got


def record(comm: Comm, n: int) -> dict[str, list[tuple[str, int, int]]]:
    recorder, events = Recorder(comm), {}
    for algorithm in OURS:
        recorder.events = events[algorithm] = []
        algorithms.all_reduce(recorder, data(comm.rank, n), algorithm=algorithm)
    return events


def hand_over(ranks: list[list[tuple[str, int, int]]]) -> int:
    """How long it takes, in messages, where a send waits until it is received; -1 if for ever."""
    clocks, left = [0] * len(ranks), [deque(events) for events in ranks]
    moved = True
    while moved:
        moved = False
        for src, events in enumerate(left):
            while events and events[0][0] == "send" and left[events[0][1]]:
                _, dst, size = events[0]
                if left[dst][0] != ("recv", src, size):
                    break
                events.popleft()
                left[dst].popleft()
                clocks[src] = clocks[dst] = max(clocks[src], clocks[dst]) + 1
                moved = True
    return -1 if any(left) else max(clocks)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_messages_steps_and_bytes_are_those_of_the_docstring(world: int) -> None:
    n = 45
    ranks = in_threads(world, record, n)
    doublings = int(log2(core(world)))
    folding = 2 if world > core(world) else 0
    steps = {  # on the busiest rank, and one after the other where one message takes a step
        "naive": (world - 1, 2 * (2 * world - 3) if world > 1 else 0),
        "tree": (2 * ceil(log2(world)), 2 * ceil(log2(world))),
        "recursive_doubling": (doublings + folding, 2 * doublings + folding),
        "halving_doubling": (2 * doublings + folding, 4 * doublings + folding),
    }
    most = {  # entries
        "naive": (world - 1) * n,
        "tree": ceil(log2(world)) * n,
        "recursive_doubling": (doublings + folding // 2) * n,
    }
    together = {
        "naive": world * (world - 1) * n,
        "tree": 2 * (world - 1) * n,
        "recursive_doubling": (doublings * core(world) + 2 * (world - core(world))) * n,
        "halving_doubling": 2 * (world - 1) * n,
    }
    for algorithm in OURS:
        events = [rank[algorithm] for rank in ranks]
        sent = [
            (src, dst, size)
            for src, done in enumerate(events)
            for what, dst, size in done
            if what == "send"
        ]
        assert Counter(sent) == Counter(messages(algorithm, world, n)), algorithm
        per_rank = [sum(size for src, _, size in sent if src == rank) for rank in range(world)]
        assert sum(per_rank) == together[algorithm], algorithm
        assert max(per_rank) == most.get(algorithm, max(per_rank)), algorithm
        longest = max(map(len, events))
        exchanges = longest // 2  # a message out and one in
        if algorithm == "tree":
            busiest = longest
        elif folding and algorithm != "naive":
            busiest = exchanges + 1  # where a message in comes first, and one out last
        else:
            busiest = exchanges
        assert (busiest, hand_over(events)) == steps[algorithm], algorithm


def test_halving_doubling_sends_what_the_formula_says() -> None:
    for world in (2, 4, 8):
        n = 8 * world
        for rank in range(world):
            sent = bytes_sent("halving_doubling", world, rank, 8 * n)
            assert sent == 2 * (world - 1) * n * 8 // world == sum(ring_bytes(world, rank, n, 8))


# -- bits, forms, dtypes ---------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(world=st.integers(1, 7), n=st.integers(0, 60), dtype=st.sampled_from("bHil"))
def test_integers_are_exact_in_any_world(world: int, n: int, dtype: str) -> None:
    parts = [data(rank, n, dtype) for rank in range(world)]
    expected = np.sum(parts, axis=0, dtype=dtype)
    for got in in_threads(world, lambda comm: in_turn(comm, parts[comm.rank])):
        for algorithm, total in got.items():
            assert total.dtype == expected.dtype and np.array_equal(total, expected), algorithm


def in_turn(comm: Comm, x) -> dict[str, np.ndarray]:
    return {name: algorithms.all_reduce(comm, x, algorithm=name) for name in ALL}


def strange(rank: int, n: int, dtype: str) -> np.ndarray:
    """NaNs of either sign, with a payload of each rank's own, zeros of either sign, infinities."""
    rng = np.random.default_rng([rank, n])
    part = {"F": "f", "D": "d"}.get(dtype, dtype)
    size = n * np.dtype(dtype).itemsize // np.dtype(part).itemsize
    x = rng.choice([0.0, -0.0, np.inf, -np.inf, 1.5, np.nan, -np.nan, np.nan], size).astype(part)
    payload = rng.integers(1, 400, size)
    bits = x.view(f"u{x.itemsize}")
    bits[np.isnan(x)] |= payload[np.isnan(x)].astype(bits.dtype)
    return x.view(dtype)


def all_strange(comm: Comm) -> list[str]:
    uneven = []
    for dtype in "efdFD":
        for n in (1, 2, 21):
            for algorithm in OURS:
                got = algorithms.all_reduce(comm, strange(comm.rank, n, dtype), algorithm=algorithm)
                if not same_bits(comm, got):
                    uneven.append(f"{algorithm} {dtype}[{n}]")
    return uneven


@pytest.mark.parametrize("world", [2, 5, 8])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf
def test_not_even_nans_differ_between_ranks(world: int) -> None:
    assert in_threads(world, all_strange) == [[]] * world


def all_forms(comm: Comm) -> bool:
    base = data(comm.rank, (6, 8))
    forms = {
        "strided": base[::2, 1::3],
        "transposed": base.T,
        "0-d": np.array(comm.rank + 0.25),
        "scalar": np.float32(comm.rank + 0.5),
        "empty (0, 3)": np.empty((0, 3)),
        "foreign byte order": base.astype(">f8" if np.little_endian else "<f8"),
        "int": comm.rank + 3,
        "list": [[comm.rank, 2], [3, 4]],
        "63 dimensions": np.full((1,) * 63, comm.rank + 1.0),
    }
    for name, x in forms.items():
        before = np.array(x)
        expected = comm.all_reduce(x)
        for algorithm, got in in_turn(comm, x).items():
            about = f"{name}, {algorithm}"
            assert got.shape == expected.shape and got.dtype == expected.dtype, about
            assert np.allclose(got, expected) and got.flags.writeable, about
            assert np.array_equal(x, before), f"{about}: the input changed"
    for dtype in DTYPES:
        if dtype != "?":
            x = data(comm.rank, (3, 5), dtype)
            for algorithm, got in in_turn(comm, x).items():
                assert got.dtype == x.dtype and got.shape == (3, 5), (dtype, algorithm)
                exact = np.sum([data(r, (3, 5), dtype) for r in range(comm.world)], 0, dtype)
                near = 1e-2 if dtype == "e" else 1e-5
                assert np.allclose(got, exact, rtol=near, atol=near), (dtype, algorithm)
    return True


def all_outs(comm: Comm) -> bool:
    n = 50
    x = data(comm.rank, n)
    for algorithm in ALL:
        for op in algorithms.OPS:
            expected = algorithms.all_reduce(comm, x, op, algorithm)
            out = np.full(n, np.nan)
            assert algorithms.all_reduce(comm, x, op, algorithm, out=out) is out
            assert np.array_equal(out, expected)
            itself = x.copy()
            algorithms.all_reduce(comm, itself, op, algorithm, out=itself)
            assert np.array_equal(itself, expected)
            strided = np.full(2 * n, -1.0)
            algorithms.all_reduce(comm, x, op, algorithm, out=strided[::2])
            assert np.array_equal(strided[::2], expected) and (strided[1::2] == -1).all()
            shifted = np.concatenate([x, [0.0]])
            algorithms.all_reduce(comm, shifted[:n], op, algorithm, out=shifted[1:])
            assert np.array_equal(shifted[1:], expected)
        half = np.full(9, 60_000, np.float16)
        mean = algorithms.all_reduce(comm, half, "mean", algorithm)  # the sum would be infinite
        assert mean.dtype == np.float16 and np.allclose(mean.astype(float), 60_000, rtol=2e-3)
    return True


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("fn", [all_forms, all_outs])
def test_forms_dtypes_and_out(fn, world: int) -> None:
    assert all(in_threads(world, fn))


def refusals(comm: Comm) -> bool:
    x = data(comm.rank, 4)
    for bad in ("butterfly", "Tree", None, x):
        with pytest.raises(ValueError, match=f"rank {comm.rank}: .*: algorithm=") as caught:
            algorithms.all_reduce(comm, x, algorithm=bad)
        assert str(bad)[:40] in str(caught.value)
        assert all(repr(name) in str(caught.value) for name in ALL)
    for algorithm in ALL:
        with pytest.raises(ValueError, match=rf"rank {comm.rank}: .*: op='max'.*'sum', 'mean'"):
            algorithms.all_reduce(comm, x, "max", algorithm)
        with pytest.raises(TypeError, match="mean of int64"):
            algorithms.all_reduce(comm, np.arange(3), "mean", algorithm)
        with pytest.raises(TypeError, match="bools"):
            algorithms.all_reduce(comm, x > 0, algorithm=algorithm)
        with pytest.raises(ValueError, match="out= has shape"):
            algorithms.all_reduce(comm, x, algorithm=algorithm, out=np.empty(5))
    assert comm.bytes_sent == 0
    return int(comm.all_reduce(1)) == comm.world


def test_refused_before_anything_is_sent() -> None:
    assert all(in_threads(3, refusals))


# -- ranks that differ -----------------------------------------------------------------------------


def differ(comm: Comm, odd: int, theirs: tuple, rest: tuple) -> str:
    comm.timeout = 0.5 if theirs != rest else None
    n, dtype, op, algorithm = theirs if comm.rank == odd else rest
    try:
        algorithms.all_reduce(comm, data(comm.rank, n, dtype), op, algorithm)
        comm.barrier()  # as a rank that goes on
    except (DesyncError, CommTimeout, PeerLost) as error:
        hang_up(comm)  # as a rank that ends
        return f"{type(error).__name__}: {error}"
    return ""


NORMAL = (9, "f8", "sum", "tree")


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 1), (4, 3)])
def test_a_mixture_of_algorithms_neither_hangs_nor_passes(world: int, odd: int) -> None:
    names = [*OURS, "ring"]
    for theirs in names:
        for rest in names:
            said = in_threads(world, differ, odd, (9, "f8", "sum", theirs), (9, "f8", "sum", rest))
            assert all(said) == any(said) == (theirs != rest), f"{theirs} among {rest}: {said}"
            causes = [text for text in said if not text.startswith("PeerLost")]
            assert causes, f"{theirs} among {rest}: {said}"


@pytest.mark.parametrize("algorithm", OURS)
@pytest.mark.parametrize("change", [(1, "f8", "sum"), (9, "i8", "sum"), (9, "f8", "mean")])
def test_sizes_dtypes_and_ops_are_compared(change: tuple, algorithm: str) -> None:
    said = in_threads(3, differ, 1, (*change, algorithm), (*NORMAL[:3], algorithm))
    assert all(said), said
    assert any("DesyncError" in text for text in said)


def in_two_minds(comm: Comm) -> None:
    algorithms.all_reduce(comm, np.zeros(5), algorithm="naive" if comm.rank else "tree")


def half_a_ring(comm: Comm) -> None:
    algorithms.all_reduce(comm, np.zeros(5), algorithm="ring" if comm.rank else "tree")


def test_spawn_says_who_was_where() -> None:
    with pytest.raises(DesyncError, match=r"all_reduce #1 \(float64\[5\], sum\)") as caught:
        spawn(half_a_ring, 3, method="forkserver", timeout=20)
    assert "recv from rank" in str(caught.value)
    with pytest.raises(DesyncError) as caught:
        spawn(in_two_minds, 3, method="forkserver", timeout=20)
    said = str(caught.value)
    assert "(tree, sum) and expects float64[5] from rank 1" in said
    assert "sent float64[5] of (naive, sum)" in said and "in in_two_minds" in said


# -- auto ------------------------------------------------------------------------------------------


def test_auto_is_a_table_and_the_page_shows_it() -> None:
    page = (ROOT / "course/docs/algorithms.md").read_text()
    assert all(f"`{name}`" in page for name in ALL)
    for world in range(1, 70):
        names = [algorithms.choice(world, 1 << k) for k in range(30)]
        assert set(names) <= {*OURS, "ring"} and names[-1] == "ring"
    for world, at_least, at_most, name in algorithms.AUTO:
        assert f"| {world} | {at_least:,} | {at_most:,} | `{name}` |" in page
        assert algorithms.choice(world, at_least) == algorithms.choice(world, at_most) == name
        assert algorithms.choice(world, at_least - 1) == "ring"
        assert algorithms.choice(world, at_most + 1) == "ring"
