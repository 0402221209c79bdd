"""What can be said before anything starts: every mistake of a call to spawn, in one short error.

A rank is a fresh interpreter.  What cannot work there is found here, in the parent, where the error
can name the line to change, and not in four tracebacks from four processes.
"""

from __future__ import annotations

import ast
import errno
import inspect
import linecache
import math
import multiprocessing
import numbers
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
_CONDITIONAL = (ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.While)


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
    _check_importable(fn, args)
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
    """A full mesh takes world · (world - 1) descriptors in the parent, a process takes six.

    Eight more are the board's, the selector's and multiprocessing's own.
    """
    needed = world * (world - 1) + 6 * world + 8
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
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"spawn: timeout={timeout!r} is neither a number of seconds nor None")
    try:
        seconds = float(timeout)
    except OverflowError:
        seconds = math.inf
    if not seconds > 0:
        raise ValueError(f"spawn: timeout={timeout!r} must be positive, or None for no limit")
    return seconds


def _check_importable(fn: Any, args: tuple[Any, ...]) -> None:
    """A rank finds ``fn`` by its module and name, and calls it as fn(comm, *args)."""
    if not callable(fn):
        raise TypeError(f"spawn: fn={fn!r} is not callable; it is called as fn(comm, *args)")
    name = getattr(fn, "__qualname__", "")
    advice = "write it with def at the top level of a module, so that each rank can import it"
    if "<lambda>" in name:
        raise ValueError(f"spawn: fn is a lambda; {advice}")
    if "<locals>" in name:
        raise ValueError(f"spawn: fn={name} is defined inside a function; {advice}")
    if getattr(fn, "__module__", None) == "__main__" and not _is_imported_again():
        raise ValueError(
            f"spawn: fn={name} lives in a notebook, on standard input, in -c or in a __main__.py,"
            " which no new process imports; put it into a module (a file) and import it from there"
        )
    try:
        inspect.signature(fn).bind(None, *args)
    except TypeError as error:
        raise TypeError(f"spawn: {name or fn} is called as fn(comm, *args): {error}") from None
    except ValueError:  # a function in C without a signature
        pass


def _is_imported_again() -> bool:
    """Whether a new process imports the main module: a script or -m module, but no __main__.py."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return not (spec.name == "__main__" or spec.name.endswith(".__main__"))
    path = getattr(main, "__file__", None) or ""
    return bool(path) and not path.startswith("<")


def _check_main_guard(frame: FrameType | None) -> None:
    """A rank imports the main script again: without a guard it would call spawn again, too.

    Anything conditional around the call may be a guard; only what is certain is refused here.  What
    slips through, multiprocessing notices in the rank.
    """
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    if frame is None or not _is_imported_again():
        return
    path, line = frame.f_code.co_filename, frame.f_lineno
    try:
        script = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return
    around = [node for node in ast.walk(script) if _spans(node, line)]
    if around and not any(isinstance(node, _CONDITIONAL) for node in around):
        raise RuntimeError(
            f"spawn: {path}, line {line} runs again in every rank, because each of them imports"
            ' the main script; put it under  if __name__ == "__main__":'
        )


def _spans(node: ast.AST, line: int) -> bool:
    return bool(getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0))


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
