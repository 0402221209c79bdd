"""Runs suites against libraries, in warm worker processes, with a deadline for every test."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

FORKSERVER, SPAWN = "forkserver", "spawn"
SAID = 2000  # characters of a worker's last words
_HERE = Path(__file__).resolve().parent
_BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

S = TypeVar("S")
R = TypeVar("R")


class WrongFileError(Exception):
    """Python imported another file than the one that was to be judged."""


class RunnerError(Exception):
    """A worker ended by itself: a fault of the grader or of the machine, never a verdict."""


@dataclass(frozen=True)
class Result:
    """What came of one test in one run."""

    test: str
    outcome: str  # passed, failed, skipped, timeout, broken (its file could not be imported)
    seconds: float = 0.0
    setup: float = 0.0  # of those seconds
    message: str = ""
    text: str = ""  # with the traceback
    stacks: tuple[dict[str, Any], ...] = ()  # of every process, at a timeout


@dataclass
class Run:
    """All that one run told."""

    collected: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    lines: dict[str, list[int]] = field(default_factory=dict)  # of the judged file, by test


@dataclass(frozen=True)
class Job:
    """One run to do: a choice of a suite's tests, in a given order, on a library."""

    library: Path
    judged: Path
    module: str
    tests: Path
    scratch: Path
    chosen: tuple[str, ...]
    limits: tuple[tuple[str, float], ...] = ()  # seconds, by test
    limit: float = 30.0  # of tests without one of their own
    stop: bool = False  # at the first failure
    trace: bool = False
    rooms: tuple[str, ...] = ()  # modules beside the judged one that may stay loaded
    method: str = FORKSERVER


class Worker:
    """One warm process; see worker.py."""

    def __init__(self, preload: Sequence[str]) -> None:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "OL_"))
        }
        path = os.pathsep.join([str(_HERE / "inside"), str(_HERE.parent)])
        ours = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe would fill up unread)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ol.worker", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd=os.sep,
            env=kept | dict.fromkeys(_BLAS, "1") | ours,
            start_new_session=True,  # a Ctrl-C reaches the grader alone, which ends its workers
            text=True,
        )

    def run(self, job: Job) -> Run:
        """Do one job; WrongFileError where it imported another file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = vars(job) | {
            "limits": dict(job.limits),
            "folder": job.scratch,
            "events": job.scratch / "events",
            "output": job.scratch / "output",
        }
        with suppress(BrokenPipeError):  # the reason is on its standard error
            self._process.stdin.write(json.dumps(request, default=str) + "\n")
            self._process.stdin.flush()
        run = Run()
        for line in self._process.stdout:
            told = json.loads(line)
            if "collected" in told:
                run.collected = told["collected"]
            elif "end" in told:
                _note_events(run, told["events"])
                return run
            else:
                run.results.append(_result(told, job))
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        raise RunnerError(f"a worker ended: {said[-SAID:] or 'it said nothing'}")

    def close(self) -> None:
        """End the worker and all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()


def _result(told: dict[str, Any], job: Job) -> Result:
    """A result, with the learner's paths in place of those of the stage."""
    for field_ in ("message", "text"):
        text = told.get(field_, "")
        for place, name in ((job.library, "python"), (job.tests, "")):
            for path in (os.path.relpath(place, job.scratch), str(place)):
                text = text.replace(path + os.sep, f"{name}{os.sep}".lstrip(os.sep))
        told[field_] = text
    return Result(**told | {"stacks": tuple(told.get("stacks", ()))})


def _note_events(run: Run, events: Iterable[dict[str, Any]]) -> None:
    test = ""  # lines before the first test belong to the import, and so to every test
    for event in events:
        if "wrong" in event:
            raise WrongFileError(event["wrong"])
        test = event.get("test", test)
        if "line" in event:
            run.lines.setdefault(test, []).append(event["line"])


class Runner:
    """A few workers, started when there is work, and ended by ``close``."""

    def __init__(self, preload: Sequence[str], workers: int = 2) -> None:
        self._preload = preload
        self._count = workers
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: list[Worker] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(workers)

    def close(self) -> None:
        """End all workers, and the threads that wait for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            workers, self._all, self._count = self._all, [], 0
        for worker in workers:
            worker.close()
        self._threads.shutdown()

    def run(self, job: Job) -> Run:
        """Do one job in an idle worker."""
        worker = self._worker()
        try:
            return worker.run(job)
        finally:
            self._idle.put(worker)

    def map(self, work: Callable[[S], R], subjects: Iterable[S]) -> list[R]:
        """``work`` on each subject, as many at a time as there are workers."""
        futures = [self.submit(work, subject) for subject in subjects]
        return [future.result() for future in futures]

    def submit(self, work: Callable[..., R], *args: object) -> Future[R]:
        """``work`` in a thread, as soon as a worker is free."""
        return self._threads.submit(work, *args)

    def _worker(self) -> Worker:
        with self._lock:
            if self._idle.empty() and len(self._all) < self._count:
                self._all.append(Worker(self._preload))
                return self._all[-1]
            if not self._count:
                raise RunnerError("the workers have been ended")
        return self._idle.get()
