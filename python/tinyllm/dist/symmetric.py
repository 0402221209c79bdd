"""Symmetric arrays: each rank's lies in memory that all ranks share, and all know where.

What is reduced in such an array is added up where it lies.  That takes that all ranks bring the
same array, or the same part of it; so an array is known by its *place*, a number that is the same
on all ranks, for the whole array and for each contiguous view of it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any, NamedTuple

import numpy as np

from tinyllm.dist import frame
from tinyllm.dist.arrays import Array
from tinyllm.dist.port import Port
from tinyllm.dist.segment import Table, mapped, reserved_file


class Part(NamedTuple):
    """A symmetric array, or the same view of it on all ranks."""

    place: int  # the same on all ranks, and that of no other part
    address: int  # where it lies here
    rows: list[Array]  # all ranks', as bytes
    plans: dict[Any, Any]  # what others have prepared for this part


class SymmetricArrays:
    """Those of one Comm, for as long as somebody holds them or a view of them."""

    def __init__(self, table: Table, port: Port) -> None:
        self._table, self._port = table, port
        self._made = 0  # how many there ever were: the same on all ranks
        self._parts: dict[int, tuple[Part, Any]] = {}  # by the array's id

    def make(self, like: Array) -> Array:
        """An array like ``like``, on all ranks at once; OSError where there is no memory for it."""
        stride = -max(1, like.nbytes) // mmap.PAGESIZE * -mmap.PAGESIZE
        starts = [rank * stride for rank in range(self._table.world)]
        memory = self._shared_memory(len(starts) * stride)
        array: Array = np.ndarray(like.shape, like.dtype, memory, starts[self._table.rank])
        rows = [np.frombuffer(memory, np.uint8, like.nbytes, start) for start in starts]
        self._made += 1
        self._remember(array, Part(self._made * frame.MAX_BYTES, _address(array), rows, {}))
        return array

    def _shared_memory(self, size: int) -> mmap.mmap:
        """``size`` bytes that rank 0 makes, and hands out through the pipes."""
        fd = reserved_file("symmetric array", size) if self._table.rank == 0 else -1
        try:
            self._table.meet()
            fd = self._port.hand_out(fd)
            return mapped(fd, size)
        finally:
            if fd >= 0:
                os.close(fd)

    def part(self, array: Array) -> Part | None:
        """What contiguous ``array`` is of the symmetric arrays, if it is one or lies in one."""
        if not self._parts:
            return None
        known, _ = self._parts.get(id(array), (None, None))
        if known is None and type(array.base) is np.ndarray:
            whole, _ = self._parts.get(id(array.base), (None, None))
            if whole:
                offset = _address(array) - whole.address
                rows = [row[offset : offset + array.nbytes] for row in whole.rows]
                known = Part(whole.place + offset, whole.address + offset, rows, {})
                self._remember(array, known)
        return known

    def _remember(self, array: Array, part: Part) -> None:
        parts, key = self._parts, id(array)
        parts[key] = part, weakref.ref(array, lambda _: parts.pop(key))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
