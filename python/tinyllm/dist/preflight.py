"""What can be said before anything starts: every mistake of a call to spawn, in one short error.

A rank is a fresh interpreter.  What cannot work there is found here, in the parent, where the error
can name the line to change, and not in four tracebacks from four processes.
"""

from __future__ import annotations

import ast
import errno
import linecache
import math
import multiprocessing
import operator
import os
import pickle
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

METHODS = ("spawn", "forkserver")
_GUARDS = ("__name__", "parent_process", "current_process")


@dataclass(frozen=True)
class Job:
    """A checked call to spawn."""

    name: str  # the function's
    payload: bytes  # (fn, args), pickled once for all ranks
    world: int
    timeout: float  # seconds; inf for no limit
    method: str


def checked_job(
    fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float | None, method: str
) -> Job:
    """The job, or the ValueError, TypeError or RuntimeError that says what to change."""
    world = whole_number("spawn: world", world, at_least=1)
    seconds = _seconds(timeout)
    if method not in METHODS:
        raise ValueError(
            f"spawn: method={method!r}; ranks start by {' or '.join(map(repr, METHODS))}"
            " (a fork would inherit the pipes of the other ranks)"
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn: a daemon process may have no children; start this one with daemon=False"
        )
    _check_importable(fn)
    _check_main_guard(sys._getframe(2))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return Job(name, _pickled(fn, args), world, seconds, method)


def whole_number(what: str, value: Any, at_least: int) -> int:
    """``value`` as an int; TypeError for what is none (bools, floats), ValueError if too small."""
    if isinstance(value, bool):
        raise TypeError(f"{what}={value!r} is a bool, not an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r} is a {type(value).__name__}, not an integer") from None
    if number < at_least:
        raise ValueError(f"{what}={number} must be at least {at_least}")
    return number


def rank(what: str, value: Any, me: int, world: int) -> int:
    """``value`` as a rank of this world, or the error that rank ``me`` raises."""
    number = whole_number(f"rank {me}: {what}", value, at_least=0)
    if number >= world:
        raise ValueError(f"rank {me}: {what}={number}, but a world of {world} ends at {world - 1}")
    return number


def peer(what: str, value: Any, me: int, world: int) -> int:
    """``value`` as a rank other than ``me``."""
    number = rank(what, value, me, world)
    if number == me:
        raise ValueError(f"rank {me}: {what}={number} is this rank itself")
    return number


def check_descriptors(world: int) -> None:
    """A full mesh takes world · (world - 1) descriptors in the parent, a process takes six."""
    needed = world * (world - 1) + 6 * world
    used = len(os.listdir("/dev/fd"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if used + needed > limit:
        raise OSError(
            errno.EMFILE,
            f"spawn: a world of {world} needs {needed:,} descriptors besides the {used} in use, but"
            f" the limit is {limit:,}; raise it (ulimit -n {used + needed}) or take fewer ranks",
        )


def _seconds(timeout: Any) -> float:
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"spawn: timeout={timeout!r} is neither a number of seconds nor None")
    if not timeout > 0:
        raise ValueError(f"spawn: timeout={timeout!r} must be positive, or None for no limit")
    return float(timeout)


def _check_importable(fn: Any) -> None:
    """A rank finds ``fn`` by its module and name."""
    if not callable(fn):
        raise TypeError(f"spawn: fn={fn!r} is not callable; it is called as fn(comm, *args)")
    name = getattr(fn, "__qualname__", "")
    advice = "write it with def at the top level of a module, so that each rank can import it"
    if "<lambda>" in name:
        raise ValueError(f"spawn: fn is a lambda; {advice}")
    if "<locals>" in name:
        raise ValueError(f"spawn: fn={name} is defined inside a function; {advice}")
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if getattr(fn, "__module__", None) == "__main__" and spec is None and not _has_file(main):
        raise ValueError(
            f"spawn: fn={name} lives in a notebook, on standard input or in -c, where no new"
            " process can import it; put it into a module (a file) and import it from there"
        )


def _has_file(main: Any) -> bool:
    return bool(getattr(main, "__file__", None)) and not main.__file__.startswith("<")


def _check_main_guard(frame: FrameType | None) -> None:
    """A rank imports the main script again: without a guard it would call spawn again, too."""
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None or not _has_file(sys.modules["__main__"]):
        return
    path, line = frame.f_code.co_filename, frame.f_lineno
    try:
        body = ast.parse("".join(linecache.getlines(path))).body
    except SyntaxError:
        return
    for node in body:
        if node.lineno <= line <= (node.end_lineno or node.lineno) and not _is_guard(node):
            raise RuntimeError(
                f"spawn: {path}, line {line} runs again in every rank, because each of them imports"
                ' the main script; put it under  if __name__ == "__main__":'
            )


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(word in ast.unparse(node.test) for word in _GUARDS)


def _pickled(fn: Any, args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception:
        for what, value in [("fn", fn), *((f"args[{i}]", arg) for i, arg in enumerate(args))]:
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"spawn: {what} ({type(value).__name__}) cannot go to another process: {error}"
                ) from error
        raise
