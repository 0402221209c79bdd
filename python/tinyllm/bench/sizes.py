"""Sizes as nccl-tests writes them: ``8``, ``64K``, ``8:32M``."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
LARGEST = 1 << 40  # bytes; no machine that this is for holds more


def parsed(text: str) -> int:
    """The bytes of ``512``, ``64K``, ``32M`` or ``1G``; ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,13})([KMG]?)(iB|B)?", text, re.ASCII | re.IGNORECASE)
    size = int(match[1]) * UNITS[match[2].upper()] if match else 0
    if not 1 <= size <= LARGEST:
        raise ValueError(f"{text[:40]!r} is no size, such as 8, 64K, 32M or 1G")
    return size


def bounds(text: str) -> tuple[int, int]:
    """The first and last size of ``8:32M``; of ``8``, twice the same."""
    first, colon, last = text.partition(":")
    low = parsed(first)
    high = parsed(last) if colon else low
    if high < low:
        raise ValueError(f"{text[:40]!r} begins above its end")
    return low, high


def steps(low: int, high: int, factor: int) -> list[int]:
    """``low`` times 1, factor, factor², ..., and ``high`` itself as the last."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return [*sizes, high]


def merged(ranges: Iterable[tuple[int, int]], factor: int) -> list[int]:
    """The sizes of all ranges, each once, in ascending order."""
    return sorted({size for low, high in ranges for size in steps(low, high, factor)})


def written(size: int) -> str:
    """The shortest text that ``parsed`` reads as ``size``."""
    for unit, value in reversed(UNITS.items()):
        if size % value == 0 and size:
            return f"{size // value}{unit}"
    return str(size)
