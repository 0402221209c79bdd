"""Mistakes in a call to spawn or chunk_bounds: one short error before anything starts."""

from __future__ import annotations

import resource
import threading

import numpy as np
import pytest
from dist_faults import environment, takes
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.dist.comm import chunk_bounds, spawn
from tinyllm.dist.launch import cores


@given(n=st.integers(0, 10**6), world=st.integers(1, 300))
def test_chunk_bounds_are_array_splits(n: int, world: int) -> None:
    sizes = [stop - start for start, stop in chunk_bounds(n, world)]
    assert sizes == [part.size for part in np.array_split(np.empty(n, bool), world)]


def needs_two(comm, first, second): ...


def test_chunk_bounds_refuses() -> None:
    for n, world in ((-1, 2), (3, 0), (3, -2)):
        with pytest.raises(ValueError, match="chunk_bounds: "):
            chunk_bounds(n, world)
    for n, world in ((3.0, 2), (3, True), ("3", 2), (3, None)):
        with pytest.raises(TypeError, match="not an integer"):
            chunk_bounds(n, world)


@pytest.mark.parametrize(
    ("world", "error"),
    [(0, ValueError), (-1, ValueError), (3.5, TypeError), (True, TypeError), ("4", TypeError)],
)
def test_world_is_a_positive_integer(world, error) -> None:
    with pytest.raises(error, match="spawn: world="):
        spawn(takes, world)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (float("nan"), ValueError),
        ("5", TypeError),
        (True, TypeError),
    ],
)
def test_timeout_is_positive_or_none(timeout, error) -> None:
    with pytest.raises(error, match="spawn: timeout="):
        spawn(takes, 2, timeout=timeout)


def test_method_is_known() -> None:
    with pytest.raises(ValueError, match="method='fork'; ranks start by 'spawn' or 'forkserver'"):
        spawn(takes, 2, method="fork")


def test_fn_is_importable() -> None:
    def closure(comm): ...

    with pytest.raises(ValueError, match="a lambda; write it with def at the top level"):
        spawn(lambda comm: 0, 2)
    with pytest.raises(ValueError, match="closure is defined inside a function"):
        spawn(closure, 2)
    with pytest.raises(TypeError, match=r"needs_two is called as fn\(comm, \*args\): missing"):
        spawn(needs_two, 2)
    with pytest.raises(TypeError, match="fn=3 is not callable"):
        spawn(3, 2)


def test_arguments_pickle() -> None:
    with pytest.raises(TypeError, match=r"spawn: args\[1\] \(lock\) cannot go to another process"):
        spawn(takes, 2, "fine", threading.Lock())


def test_descriptors_are_counted_before_any_is_opened() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(
            OSError, match=r"64 needs 4,424 descriptors besides the .* is 256; raise"
        ):
            spawn(takes, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_blas_threads_share_the_cores(monkeypatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for world in (1, 3):
        threads = {rank["OPENBLAS_NUM_THREADS"] for rank in spawn(environment, world)}
        assert threads == {str(max(1, cores() // world))}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert spawn(environment, 1) == [{"OMP_NUM_THREADS": "7"}]
