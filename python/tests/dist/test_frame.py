"""Headers: what is packed comes back, and what is no header is refused before it is believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyllm.dist import frame
from tinyllm.dist.errors import FrameError
from tinyllm.dist.frame import Frame

frames = st.builds(
    Frame,
    op=st.sampled_from(frame.OPS),
    seq=st.integers(0, 2**63),
    dtype=st.sampled_from([None, *map(np.dtype, "?bhilBHILefdgFDG")]),
    shape=st.lists(st.integers(0, 9), max_size=10).map(tuple),
    redop=st.sampled_from(frame.REDOPS),
    root=st.integers(-1, 10_000),
    nth=st.integers(0, 2**63),
)


@given(frames)
def test_a_header_comes_back(header: Frame) -> None:
    packed = header.pack()
    assert len(packed) == frame.SIZE
    assert frame.unpack(packed) == header
    frame.numbers(packed)[:] = memoryview(np.array([5, 6], "Q"))
    assert frame.unpack(packed) == header._replace(seq=5, nth=6)


@given(frames, frames)
def test_two_headers_are_the_same_bytes_only_if_they_say_the_same(a: Frame, b: Frame) -> None:
    assert (a.pack() == b.pack()) == (a == b)


@given(st.binary(min_size=frame.SIZE, max_size=frame.SIZE))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(FrameError):
        frame.unpack(noise)


@given(frames, st.integers(4, frame.SIZE - 1), st.integers(0, 255))
def test_a_damaged_header_is_refused_or_says_something_else(header: Frame, at, byte) -> None:
    packed = header.pack()
    changed = packed[at] != byte
    packed[at] = byte
    try:
        read = frame.unpack(packed)
    except FrameError:
        return
    assert read.nbytes <= frame.MAX_BYTES
    padding = 12 <= at < 16 or 40 <= at < 48 or at >= 48 + 8 * len(header.shape)
    assert not changed or padding or read != header


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"GET ", "begins with b'GET '"),
        (4, b"\x09", "version 9"),
        (5, b"\xff", "operation 255"),
        (7, b"\xff", "255 dimensions"),
        (32, b"|O\0\0", "dtype"),
        (32, b"<U9\0", "no number type"),
        (48, (2**62).to_bytes(8, "little"), "claims"),
    ],
)
def test_what_a_refusal_says(at: int, value: bytes, says: str) -> None:
    packed = Frame("all_reduce", 3, np.dtype("f8"), (35,), "sum").pack()
    packed[at : at + len(value)] = value
    with pytest.raises(FrameError, match=says):
        frame.unpack(packed)


def test_how_an_operation_reads() -> None:
    f8 = np.dtype("f8")
    assert str(Frame("all_reduce", 3, f8, (5, 7), "sum")) == "all_reduce #3 (float64[5,7], sum)"
    assert str(Frame("broadcast", 4, f8, (), root=2)) == "broadcast #4 (float64[], src 2)"
    assert str(Frame("broadcast", 4, root=2)) == "broadcast #4 (src 2)"
    assert str(Frame("barrier", 9)) == "barrier #9"
    assert str(Frame("send", 2, f8, (3,), root=1, nth=7)) == "send to rank 1 (message 7, after #2)"
    assert str(Frame("recv", 2, root=1, nth=7)) == "recv from rank 1 (message 7, after #2)"
