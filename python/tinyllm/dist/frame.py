"""The header in front of every message: fixed in size, binary, in the machine's byte order.

    0    4    5    6      7     8      12     16    24      32      40     48       560
    +----+----+----+------+-----+------+------+-----+-------+-------+------+--------+
    |tllm|ver |op  |redop |ndim | root |  -   | seq | nth   | dtype |  -   | shape  |  payload ...
    +----+----+----+------+-----+------+------+-----+-------+-------+------+--------+

``seq`` numbers a Comm's collectives; ``nth`` numbers the messages of one ordered pair of ranks
(send and recv only).  ``shape`` has room for NumPy's 64 dimensions.  A ring's messages carry
chunks, but their header describes the whole array, so that it is the same on every rank and in
every step: it is packed once per operation and compared whole, with ``==``.

No pickle: a header is read by its layout, and refused with FrameError where it does not fit.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from tinyllm.dist.errors import FrameError

COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "barrier", "empty")
OPS = ("send", "recv", *COLLECTIVES)
REDOPS = ("", "sum", "mean")
MAX_NDIM = 64
MAX_BYTES = 1 << 40  # a terabyte in one message is a broken header, not a message

_MAGIC, _VERSION = b"tllm", 1
_FIXED = struct.Struct("=4sBBBBi4xQQ8s8x")
_SHAPE = [struct.Struct(f"={ndim}Q") for ndim in range(MAX_NDIM + 1)]
SEQ, NTH = 0, 1  # in what `numbers` gives
SIZE = _FIXED.size + _SHAPE[MAX_NDIM].size

_OP_CODE = {op: code for code, op in enumerate(OPS)}
_REDOP_CODE = {redop: code for code, redop in enumerate(REDOPS)}


class Frame(NamedTuple):
    """A header in words: which call a message belongs to, and what it carries."""

    op: str
    seq: int
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    redop: str = ""
    root: int = -1
    nth: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part: neither send nor recv."""
        return self.op not in ("send", "recv")

    @property
    def nbytes(self) -> int:
        """Bytes of the array that the header describes."""
        return self.dtype.itemsize * math.prod(self.shape) if self.dtype else 0

    @property
    def digest(self) -> int:
        """28 bits that hardly another header shares; Python is fastest with numbers below 2³⁰."""
        return zlib.crc32(self.pack()) >> 4

    def pack(self) -> bytearray:
        """The header's ``SIZE`` bytes."""
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            _OP_CODE[self.op],
            _REDOP_CODE[self.redop],
            len(self.shape),
            self.root,
            self.seq,
            self.nth,
            self.dtype.str.encode() if self.dtype else b"",
        )
        return bytearray(fixed + _SHAPE[len(self.shape)].pack(*self.shape)).ljust(SIZE, b"\0")

    def __str__(self) -> str:
        """``all_reduce #3 (float64[35], sum)``, as error messages show it."""
        if self.op in ("send", "recv"):
            way = "to" if self.op == "send" else "from"
            return f"{self.op} {way} rank {self.root} (message {self.nth}, after #{self.seq})"
        array = str(self.dtype or "")
        if self.dtype and self.op != "all_gather":  # whose ranks may bring different shapes
            array += f"[{','.join(map(str, self.shape))}]"
        words = [array, self.redop, f"src {self.root}" if self.root >= 0 else ""]
        return f"{self.op} #{self.seq} ({', '.join(filter(None, words))})".replace(" ()", "")


def numbers(head: bytearray) -> memoryview:
    """The numbers of a packed header, to be written: those at ``SEQ`` and at ``NTH``."""
    return memoryview(head)[16:32].cast("Q")


def checksum(head: bytes | bytearray) -> int:
    """32 bits over what a packed header says beside its numbers."""
    return zlib.crc32(head[32:], zlib.crc32(head[:16]))


def unpack(head: bytes | bytearray | memoryview) -> Frame:
    """Read a header; FrameError names what is wrong with it."""
    magic, version, op, redop, ndim, root, seq, nth, dtype = _FIXED.unpack_from(head)
    if magic != _MAGIC:
        raise FrameError(f"a message begins with {magic!r}, not with {_MAGIC!r}")
    if version != _VERSION:
        raise FrameError(f"a message of version {version}; this side speaks {_VERSION}")
    if op >= len(OPS) or redop >= len(REDOPS) or ndim > MAX_NDIM:
        raise FrameError(f"a header with operation {op}, reduce op {redop}, {ndim} dimensions")
    shape = _SHAPE[ndim].unpack_from(head, _FIXED.size)
    frame = Frame(OPS[op], seq, _dtype(dtype), shape, REDOPS[redop], root, nth)
    if frame.nbytes > MAX_BYTES:
        raise FrameError(f"a header that claims {frame.nbytes:,} bytes ({frame})")
    return frame


def _dtype(code: bytes) -> np.dtype[Any] | None:
    if not code.rstrip(b"\0"):
        return None
    try:
        dtype = np.dtype(code.rstrip(b"\0").decode("ascii"))
    except (TypeError, ValueError) as error:
        raise FrameError(f"a header with dtype {code!r}") from error
    if dtype.kind not in "biufc":
        raise FrameError(f"a header with dtype {code!r}, which is no number type")
    return dtype
