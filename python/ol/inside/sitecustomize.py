"""Runs in every Python process of a judged run: what can only be known from inside.

Python loads a module of this name at its start.  It does nothing until the run's settings arrive:
in the process of the tests by ``begin``, in the processes that multiprocessing starts along with
the data that prepares them.  Then it makes sure that the judged file is imported and no other,
tells the stack on SIGUSR2, and notes the lines reached where the run asks for it.
"""

from __future__ import annotations

import importlib.machinery
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import resource
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

TELL_STACK = signal.SIGUSR2
LARGEST = 1 << 28  # bytes of a file, such as one that an endless loop prints to
_KEY = "ol_run"  # in multiprocessing's preparation data
_run: dict[str, Any] = {}
_reached: set[int] = set()
_spawn: Any = multiprocessing.spawn
_get_preparation_data, _prepare = _spawn.get_preparation_data, _spawn.prepare


def begin(run: dict[str, Any]) -> None:
    """Watch this process and all that it starts; ``run`` names module, judged file and events."""
    _run.update(run)
    package = run["module"].partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        if name not in run["rooms"]:
            del sys.modules[name]  # a worker has it loaded from the reference
    tempfile.tempdir = run["folder"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
    signal.signal(TELL_STACK, _tell_stack)
    sys.meta_path.insert(0, _Guard())
    if run["trace"]:
        threading.settrace(_trace)
        sys.settrace(_trace)


def begin_test(test: str) -> None:
    """From here on lines are reached by ``test``."""
    _reached.clear()
    say(test=test)


def say(**event: Any) -> None:
    """Append one line to the run's events; several processes write, a line at a time."""
    line = json.dumps(event | {"pid": os.getpid()}) + "\n"
    fd = os.open(_run["events"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


def _with_run(name: str) -> dict[str, Any]:
    data: dict[str, Any] = _get_preparation_data(name)
    return data | ({_KEY: _run | {"group": os.getpgrp()}} if _run else {})


def _prepare_with_run(data: dict[str, Any]) -> None:
    run = data.pop(_KEY, None)
    _prepare(data)
    if run:
        with suppress(OSError):  # a fork server is of another group
            os.setpgid(0, run["group"])
        output = os.open(run["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        begin(run)


_spawn.get_preparation_data, _spawn.prepare = _with_run, _prepare_with_run


class _Guard:
    """Finds the judged module, and refuses any other file of its name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _run["module"]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        found = spec.origin if spec else None
        if found is None or os.path.realpath(found) != os.path.realpath(_run["judged"]):
            say(wrong=str(found))
            raise ImportError(f"import {name} finds {found}, not the judged {_run['judged']}")
        return spec


def _tell_stack(number: int, frame: FrameType | None) -> None:
    """Who this process is and where it stands, the innermost call first."""
    stack, rank = [], None
    while frame is not None:
        stack.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        for name in ("self", "comm"):
            known = getattr(frame.f_locals.get(name), "rank", None)
            rank = known if isinstance(known, int) else rank
        frame = frame.f_back
    say(stack=stack, rank=rank, process=multiprocessing.process.current_process().name)


def _trace(frame: FrameType, event: str, arg: Any) -> Any:
    return _note if frame.f_code.co_filename == _run["judged"] else None


def _note(frame: FrameType, event: str, arg: Any) -> Any:
    if frame.f_lineno not in _reached:
        _reached.add(frame.f_lineno)
        say(line=frame.f_lineno)
    return _note
