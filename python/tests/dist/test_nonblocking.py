"""Calls in futures: the same results in the same order as blocking ones, and no error unseen."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures
from pathlib import Path

import dist_futures as ranks
import numpy as np
import pytest
from dist_worlds import MESHES, data, in_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm.dist import (
    CommError,
    CommTimeout,
    DesyncError,
    RankDied,
    RankError,
    algorithms,
    nonblocking,
)
from tinyllm.dist.comm import Comm, spawn

# -- results ---------------------------------------------------------------------------------------

# A step of a program: (name, entries, dtype, root); each can be made in either way.
NAMES = ("all_reduce", "mean", "reduce_scatter", "all_gather", "broadcast", "barrier", "tree")


def blocking(comm: Comm, step) -> np.ndarray | None:
    name, n, dtype, root = step
    x = data(comm.rank, n, dtype)
    if name == "barrier":
        return comm.barrier()
    if name == "mean":
        return comm.all_reduce(x, "mean")
    if name == "broadcast":
        return comm.broadcast(x if comm.rank == root else None, root)
    if name == "tree":
        return algorithms.all_reduce(comm, x, "sum", "tree")
    return getattr(comm, name)(x)


def queued(comm: Comm, step) -> futures.Future:
    name, n, dtype, root = step
    x = data(comm.rank, n, dtype)
    if name == "barrier":
        return nonblocking.barrier(comm)
    if name == "mean":
        return nonblocking.all_reduce(comm, x, "mean")
    if name == "broadcast":
        return nonblocking.broadcast(comm, x if comm.rank == root else None, root)
    if name == "tree":
        return nonblocking.call(comm, algorithms.all_reduce, x, "sum", "tree")
    return getattr(nonblocking, name)(comm, x)


def bits(value) -> bytes | None:
    return None if value is None else value.tobytes() + repr((value.dtype, value.shape)).encode()


def every_collective(comm: Comm) -> int:
    steps = [(name, n, "f8", comm.world - 1) for n in (0, 1, 35, 100_003) for name in NAMES]
    start = comm.bytes_sent
    expected = [bits(blocking(comm, step)) for step in steps]
    sent = comm.bytes_sent - start
    pending = [queued(comm, step) for step in steps]
    assert [bits(future.result()) for future in pending] == expected
    assert comm.bytes_sent - start == 2 * sent
    x = data(comm.rank, 35)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        out = np.empty_like(getattr(comm, name)(x))
        assert getattr(nonblocking, name)(comm, x, out=out).result() is out
        assert bits(out) == bits(getattr(comm, name)(x))
    out = np.empty(35)
    assert nonblocking.broadcast(comm, x, 0, out=out).result() is out
    assert bits(out) == bits(data(0, 35))
    return len(steps)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_bits_and_bytes_as_blocking(mesh: str, world: int) -> None:
    assert in_threads(world, every_collective, mesh=MESHES[mesh]) == [28] * world


def returns_late(comm: Comm) -> list[np.ndarray]:
    n = 300_000 // comm.world
    x = data(comm.rank, n)
    mean = algorithms.all_reduce(comm, x, "mean", "tree")
    return [comm.all_reduce(x), mean, comm.all_gather(x)]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_returns_makes_its_calls_first(mesh: str) -> None:
    early = spawn(ranks.returns_early, 3, mesh=MESHES[mesh])
    late = in_threads(3, returns_late, mesh=MESHES[mesh])
    assert [list(map(bits, rank)) for rank in early] == [list(map(bits, rank)) for rank in late]


# -- order -----------------------------------------------------------------------------------------


def mixed(comm: Comm, program, seed: int) -> tuple[list, list, int]:
    """Each rank waits where it likes; returns bits, operations as they began, and bytes."""
    rng = random.Random(seed * 100 + comm.rank)
    begun = []
    operation = comm._port.operation

    def noted(op, x=None, **options):
        port = operation(op, x, **options)
        begun.append((op, None if x is None else x.size))
        return port

    comm._port.operation = noted
    results: list = []
    for step, waits in program:
        if waits:
            results.append(blocking(comm, step))
            if comm.world > 1 or step[0] != "tree":  # which does nothing at all there
                assert all(r.done() for r in results if isinstance(r, futures.Future))
        else:
            results.append(queued(comm, step))
            if rng.random() < 0.3:
                results[-1].result()
    results = [r.result() if isinstance(r, futures.Future) else r for r in results]
    return [bits(r) for r in results], begun, comm.bytes_sent


steps = st.tuples(
    st.sampled_from(NAMES), st.integers(0, 40), st.sampled_from(["f4", "f8", "c16"]), st.just(0)
)


@pytest.mark.parametrize("mesh", MESHES)
@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 4),
    program=st.lists(st.tuples(steps, st.booleans()), max_size=12),
    seed=st.integers(0, 99),
)
def test_any_mixture_is_made_in_order(mesh: str, world: int, program, seed: int) -> None:
    all_blocking = [(step, True) for step, _ in program]
    expected = in_threads(world, mixed, all_blocking, seed, mesh=MESHES[mesh])
    assert in_threads(world, mixed, program, seed, mesh=MESHES[mesh]) == expected


def waits_for_nobody(comm: Comm, called: threading.Event) -> tuple[float, set[int]]:
    """Rank 1 joins in only after rank 0's calls have returned."""
    x = np.full(100_000, float(comm.rank))
    if comm.rank == 1:
        assert called.wait(5)
    pending = [nonblocking.all_reduce(comm, x) for _ in range(3)]
    threads = [nonblocking.call(comm, lambda comm: threading.get_ident()) for _ in range(2)]
    if comm.rank == 0:
        assert not any(future.done() for future in pending)
        with pytest.raises(TimeoutError):
            pending[0].result(timeout=0.01)
        called.set()
    total = comm.all_reduce(x)
    assert all(future.done() for future in pending)
    return total[0], {future.result() for future in threads} - {threading.get_ident()}


def test_a_call_returns_before_the_others_come() -> None:
    for total, threads in in_threads(2, waits_for_nobody, threading.Event()):
        assert total == 1.0
        assert len(threads) == 1, "one communication thread makes all calls"


def frees(comm: Comm) -> bool:
    x, out = np.zeros(1000), np.empty(1000)
    held = [weakref.ref(x), weakref.ref(out)]
    nonblocking.all_reduce(comm, x, out=out).result()
    comm.barrier()
    del x, out
    gc.collect()
    return any(ref() is not None for ref in held)


def test_a_call_that_is_done_holds_no_arrays() -> None:
    assert in_threads(2, frees) == [False, False]


# -- misuse ----------------------------------------------------------------------------------------


def from_another_thread(comm: Comm, free: threading.Event) -> str:
    if comm.rank == 1:
        assert free.wait(5)
        comm.barrier()
        return ""
    future = nonblocking.barrier(comm)
    with futures.ThreadPoolExecutor(1) as other:
        for wrong in (comm.barrier, lambda: nonblocking.barrier(comm)):
            error = other.submit(wrong).exception(timeout=5)
            assert isinstance(error, RuntimeError) and "one thread at a time" in str(error)
    free.set()
    future.result()
    return str(error)


def test_two_threads_are_refused_as_ever() -> None:
    said, _ = in_threads(2, from_another_thread, threading.Event())
    assert said.startswith("rank 0: barrier was called while calls of another thread are queued")


def while_it_is_in_a_call(comm: Comm) -> str:
    """Another thread's call, queued while the main thread is inside, fails; and that stays."""
    comm.timeout = 2.0
    if comm.rank == 1:
        time.sleep(0.3)
        comm.barrier()
        return ""
    with futures.ThreadPoolExecutor(1) as other:
        queued = other.submit(lambda: time.sleep(0.1) or nonblocking.barrier(comm).exception(5))
        comm.barrier()
        assert "one thread at a time" in str(queued.result())
    with pytest.raises(CommError) as caught:
        comm.barrier()
    return str(caught.value)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_comm_that_breaks_during_a_call_stays_broken(mesh: str) -> None:
    said, _ = in_threads(2, while_it_is_in_a_call, mesh=MESHES[mesh])
    assert "barrier on a Comm that is broken since barrier" in said


def from_a_callback(comm: Comm, free: threading.Event) -> list[str]:
    said = []

    def back(future) -> None:
        for wrong in (comm.barrier, lambda: nonblocking.barrier(comm)):
            with pytest.raises(RuntimeError) as caught:
                wrong()
            said.append(str(caught.value))

    future = nonblocking.call(comm, lambda comm: free.wait(5))
    future.add_done_callback(back)
    nested = nonblocking.call(comm, nonblocking.barrier)
    free.set()
    with pytest.raises(RuntimeError, match="the communication thread itself"):
        nested.result()
    return said


def test_callbacks_and_calls_make_no_calls() -> None:
    (said,) = in_threads(1, from_a_callback, threading.Event())
    assert len(said) == 2
    assert all("barrier was called from a future's callback" in words for words in said)


def cannot_cancel(comm: Comm, free: threading.Event) -> float:
    first = nonblocking.call(comm, lambda comm: free.wait(5))
    second = nonblocking.all_reduce(comm, 1.0)
    assert not first.cancel() and not second.cancel()
    free.set()
    return float(second.result())


def test_nothing_can_be_cancelled() -> None:
    assert in_threads(2, cannot_cancel, threading.Event()) == [2.0, 2.0]


# -- errors ----------------------------------------------------------------------------------------


def one_differs(comm: Comm) -> tuple[str, str, str]:
    """The second of three calls fails; so do those behind it, and blocking ones."""
    pending = [nonblocking.all_reduce(comm, np.ones(n)) for n in (3, 4 + (comm.rank == 1), 5)]
    assert np.array_equal(pending[0].result(), np.full(3, 3.0))
    error = pending[1].exception()
    assert isinstance(error, DesyncError)
    with pytest.raises(CommError, match="broken since all_reduce #2") as third:
        pending[2].result()
    with pytest.raises(CommError, match="broken since all_reduce #2") as late:
        comm.barrier()
    assert nonblocking.barrier(comm).exception().__cause__ is error
    return str(error), str(third.value.__cause__), str(late.value.__cause__)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_failure_fails_all_that_follow(mesh: str) -> None:
    for first, *causes in in_threads(3, one_differs, mesh=MESHES[mesh]):
        assert "rank 1: all_reduce #2 (float64[5], sum)" in first
        assert causes == [first, first]


def is_refused(comm: Comm) -> str:
    refused = nonblocking.all_reduce(comm, np.array(["a"]))
    behind = nonblocking.all_reduce(comm, np.ones(3))
    with pytest.raises(TypeError, match="no number type") as caught:
        refused.result()
    assert "in is_refused" in "".join(caught.value.__notes__)
    with pytest.raises(CommError) as late:
        behind.result()
    assert comm.bytes_sent == 0
    return str(late.value)


def test_what_is_refused_breaks_the_comm_too() -> None:
    for rank, said in enumerate(in_threads(2, is_refused)):
        assert said.startswith(
            f"rank {rank}: all_reduce on a Comm that is broken since all_reduce failed: all_reduce:"
        )


@pytest.mark.parametrize("how", ["goes", "waits"])
def test_an_error_that_nobody_asked_for_ends_the_run(how: str) -> None:
    with pytest.raises(DesyncError) as caught:
        spawn(ranks.looks_away, 3, how, timeout=20, method="forkserver")
    said = str(caught.value)
    assert "rank 1: all_reduce #1 (float64[4], sum)" in said
    line = ranks.looks_away.__code__.co_firstlineno + 2
    assert (
        f'called without waiting at\n  File "{ranks.__file__}", line {line}, in looks_away' in said
    )
    assert "dist/nonblocking.py" not in said and "concurrent" not in said


def test_whoever_asks_may_return() -> None:
    said = spawn(ranks.looks_away, 3, "looks", timeout=20, method="forkserver")
    assert said == ["DesyncError"] * 3


@pytest.mark.parametrize(
    ("fn", "kind", "says"),
    [
        (ranks.refused_at_the_end, RankError, "rank 1 raised TypeError: all_gather"),
        (ranks.dies, RankDied, "rank 2 exited with code 7"),
        (ranks.raises_meanwhile, RankError, "rank 1 raised KeyError: 'mine'"),
        (ranks.never_comes, CommTimeout, "rank 1 not done, and others wait"),
        (ranks.runs_out_of_patience, CommTimeout, "longer than comm.timeout, 0.3 s: rank 1"),
    ],
)
def test_failures_name_the_rank(fn, kind, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=says) as caught:
        spawn(fn, 3, timeout=1.5 if fn is ranks.never_comes else 20, method="forkserver")
    assert caught.value.rank == (2 if fn is ranks.dies else 1)
    assert time.monotonic() - start < 10


def test_ctrl_c_ends_the_calls(tmp_path: Path) -> None:
    code = f"import dist_futures as r; r.spawn(r.busy, 2, {str(tmp_path / 'busy')!r})"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "busy").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)
    finally:
        process.kill()
    assert process.returncode in (-signal.SIGINT, 130)
    assert err.count("Traceback") == 1 and err.rstrip().endswith("KeyboardInterrupt")
