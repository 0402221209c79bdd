"""What arrays may be, and what ``out=`` may be: the rules, once for all collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def numeric(x: ArrayLike, op: str) -> Array:
    """``x`` as a C-contiguous array of a number type in native byte order.

    ``x`` itself where it already is one.  Lists and scalars are taken as numpy.asarray takes them;
    a masked array is refused, since its mask would be lost without a word.
    """
    if type(x) is not np.ndarray:
        x = _as_array(x, op)
    if x.dtype.kind not in "biufc":
        raise TypeError(
            f"{op}: dtype {x.dtype} is no number type and does not travel between ranks"
        )
    if x.flags.c_contiguous and x.dtype.isnative:
        return x
    return np.array(x, dtype=x.dtype.newbyteorder("="), order="C")


def _as_array(x: Any, op: str) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{op}: a masked array; write x.filled(value), the mask cannot travel")
    try:
        array = np.asarray(x)
    except ValueError as error:  # a ragged list
        raise ValueError(f"{op}: this {type(x).__name__} is no array: {error}") from error
    if array.dtype == object:
        raise TypeError(
            f"{op}: {type(x).__name__} {str(x)[:40]} is no array of numbers; pass a numpy array,"
            " a number, or a list of them"
        )
    return array


def reducible(x: ArrayLike, op: str, redop: str = "sum") -> Array:
    """``x`` as ``numeric`` gives it, if its dtype has the sum or mean that ``redop`` asks for."""
    if not isinstance(redop, str) or redop not in ("sum", "mean"):
        raise ValueError(f'{op}: op={str(redop)[:40]!r}; it is "sum" or "mean"')
    x = numeric(x, op)
    if x.dtype.kind == "b":
        raise TypeError(f"{op}: a {redop} of bools is ambiguous; write x.astype(int) to count them")
    if redop == "mean" and x.dtype.kind not in "fc":
        raise TypeError(
            f"{op}: the mean of {x.dtype} is no {x.dtype}; write x.astype(float) before it,"
            " or take the sum"
        )
    return x


def result(
    op: str, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None = None
) -> Array:
    """A contiguous array to write the result into: ``out`` itself if it can be, or a fresh one."""
    if out is None:
        return np.empty(shape, dtype)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{op}: out= is {type(out).__name__}, not a plain numpy array")
    if out.shape != shape:
        raise ValueError(f"{op}: out= has shape {out.shape}, the result has {shape}")
    if out.dtype != dtype:
        raise TypeError(f"{op}: out= is {out.dtype}, the result is {dtype}")
    if not out.flags.writeable:
        raise ValueError(f"{op}: out= is read-only")
    return np.asarray(out) if out.flags.c_contiguous else np.empty(shape, dtype)


def delivered(result: Array, out: Array | None) -> Array:
    """The finished result, copied into ``out`` where that could not be written directly."""
    if out is None:
        return result
    if not np.may_share_memory(out, result):
        np.copyto(out, result)
    return out


def apart(x: Array, result: Array | None) -> Array:
    """``x``, or a copy of it if it shares memory with ``result`` without being the same array."""
    if result is None or result is x:
        return x
    if np.may_share_memory(x, result) and not _same_memory(x, result):
        return x.copy()
    return x


def _same_memory(x: Array, y: Array) -> bool:
    here, there = x.__array_interface__, y.__array_interface__
    return bool(here["data"][0] == there["data"][0] and x.nbytes == y.nbytes)
