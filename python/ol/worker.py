"""The warm process that runs tests: it has NumPy and pytest loaded, and forks once per run.

Started by ``runner.Worker`` as ``python -m ol.worker``; jobs arrive on standard input, one JSON
line each, results leave on standard output.  Each run has a process group of its own and a
deadline for every test.  After a run all that it started is ended, whatever group or session it
went to: on Linux, orphans come back to this process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing.context
import os
import resource
import select
import signal
import sys
import tempfile
import time
import types
from collections.abc import Collection, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

# What multiprocessing does not show: its helpers, which live on, and the table of start methods.
_fork_server: Any = forkserver._forkserver
_tracker: Any = resource_tracker._resource_tracker
_contexts: Any = multiprocessing.context

BETWEEN = 15.0  # seconds for collecting the tests, and from one test's end to the next one's start
ANSWER = 0.5  # seconds that processes have to tell their stack
_WITHOUT = [  # plugins of pytest that keep files, or collect garbage before every end
    word
    for name in ("cacheprovider", "faulthandler", "unraisableexception", "threadexception")
    for word in ("-p", f"no:{name}")
]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def main() -> None:
    """Take jobs until standard input ends."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output is for results alone
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not hasattr(_inside(), "begin_test"):
        sys.exit(f"sitecustomize is not the grader's, but {_inside()}")
    preload = sys.argv[1:]
    _warm_up_pytest()
    for name in (*preload, "settle"):
        with suppress(Exception):  # whoever needs it will see
            importlib.import_module(name)
    _fork_server.set_forkserver_preload([*preload, "settle"])
    try:
        for job in _lines(0):
            forkserver.ensure_running()
            for result in _run(job):
                os.write(out, json.dumps(result).encode() + b"\n")
    finally:
        _end_all(keep=())


def _warm_up_pytest() -> None:
    """Run it once on nothing: it loads most of itself when it is first used."""
    with tempfile.TemporaryDirectory() as empty:
        pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", empty, empty])


def _lines(fd: int) -> Iterator[dict[str, Any]]:
    """The JSON lines that arrive; nothing is read ahead, so that ``select`` tells the truth."""
    pending = b""
    while chunk := os.read(fd, 65536):
        pending += chunk
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            yield json.loads(line)


# -- one run, seen from outside --------------------------------------------------------------------


def _run(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fork a process that runs the job's tests; yield each test's result, then the end."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_run(job, write)
    os.close(write)
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)  # the child does it too: whoever comes first
    try:
        yield from _watch(job, child, read)
    finally:
        os.close(read)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _end_all(keep=_helpers())
    yield {"end": True, "events": _events(job)}


def _watch(job: dict[str, Any], child: int, read: int) -> Iterator[dict[str, Any]]:
    """The results of the tests; the test that outstays its deadline, or kills its process, too."""
    messages, test, limit = b"", "", BETWEEN
    deadline = time.monotonic() + limit
    while True:
        patience = min(0.05, max(0.0, deadline - time.monotonic()))
        ready, _, _ = select.select([read, 0], [], [], patience)
        if 0 in ready:
            sys.exit("the grader is gone")  # it sends nothing during a run
        chunk = os.read(read, 65536) if read in ready else b""
        *lines, messages = (messages + chunk).split(b"\n")
        for result in map(json.loads, lines):
            if "done" in result:
                return
            test, limit = "", BETWEEN
            if "start" in result:
                test, limit = result["start"], job["limits"].get(result["start"], job["limit"])
            else:
                yield result
            deadline = time.monotonic() + limit
        if lines:
            continue
        if any("wrong" in event for event in _events(job)):
            return  # nobody needs the rest, which may wait for a rank that was refused its import
        if time.monotonic() >= deadline:
            seconds = round(limit, 1)
            stacks = _stacks(job)
            yield {"test": test, "outcome": "timeout", "seconds": seconds, "stacks": stacks}
            return
        if not chunk and psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            message = "the process of the tests ended in the middle of it"
            yield {"test": test, "outcome": "failed", "message": message}
            return


def _stacks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask every process of the run where it stands; who does not answer is named with its state."""
    asked = [p for p in psutil.Process().children(recursive=True) if p.pid not in _helpers()]
    for process in asked:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGUSR2)
    patience = time.monotonic() + ANSWER
    told: dict[int, dict[str, Any]] = {}
    while len(told) < len(asked) and time.monotonic() < patience:
        time.sleep(0.01)
        told = {event["pid"]: _placed(event, job) for event in _events(job) if "stack" in event}
    for process in asked:
        with suppress(psutil.NoSuchProcess):
            told.setdefault(process.pid, {"pid": process.pid, "state": process.status()})
    return list(told.values())


def _placed(event: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The event with one call of its stack: the innermost in the judged file, else in the tests."""
    stack = event.pop("stack")
    for place in (job["judged"], job["tests"] + os.sep, job["library"] + os.sep, ""):
        inner = [call for call in stack if call[0].startswith(place)]
        if inner:
            path, line, function = inner[0]
            return event | {"at": [os.path.basename(path), line, function]}
    return event


def _events(job: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(job["events"])
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _helpers() -> set[int | None]:
    return {_fork_server._forkserver_pid, _tracker._pid}


def _end_all(keep: Collection[int | None]) -> None:
    """Kill all descendants except ``keep``."""
    while doomed := [p for p in psutil.Process().children(recursive=True) if p.pid not in keep]:
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for pid in [p.pid for p in doomed]:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


# -- one run, seen from inside ---------------------------------------------------------------------


def _be_the_run(job: dict[str, Any], write: int) -> NoReturn:
    """The forked process: become a fresh program that runs the job's tests."""
    try:
        os.setpgid(0, 0)
        output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(job["folder"])
        sys.modules["__main__"] = types.ModuleType("__main__")  # ranks need none of this program's
        sys.argv = ["pytest"]
        sys.path[:0] = [job["library"]]
        _share_the_fork_server(job["method"])
        _inside().begin(job)
        options = [
            *("-q", "-c", os.devnull, *_WITHOUT),
            *("--rootdir", job["tests"], "--tb", "short", job["tests"]),
            *("--basetemp", os.path.join(job["folder"], "pytest")),
            *(["-x"] if job["stop"] else []),
        ]
        reporter = Reporter(job, write)
        pytest.main(options, plugins=[reporter])
        reporter.say({"done": True})
    finally:
        os._exit(0)


def _inside() -> Any:
    """What Python loaded at its start, from the folder that the runner put first on its path."""
    return sys.modules.get("sitecustomize")


def _share_the_fork_server(method: str) -> None:
    """Ranks come from this worker's fork server, also where a program asks for "spawn"."""
    _fork_server.ensure_running = lambda: None  # it runs, and is no child of this process
    if method == "forkserver":
        methods = _contexts._concrete_contexts
        methods["spawn"] = methods["forkserver"]


class Reporter:
    """A pytest plugin: chooses and orders the tests, and writes what comes of each."""

    def __init__(self, job: dict[str, Any], write: int) -> None:
        self._chosen: list[str] = job["chosen"]
        self._write = write
        self._phases: list[pytest.TestReport] = []

    def say(self, result: dict[str, Any]) -> None:
        """Write one result."""
        os.write(self._write, json.dumps(result).encode() + b"\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        if report.failed:
            text = str(report.longreprtext)
            self.say({"test": report.nodeid, "outcome": "broken", "message": text, "seconds": 0.0})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tell what there is; keep what was chosen, in that order."""
        self.say({"collected": [item.nodeid for item in items]})
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self._chosen if name in by_name]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """From here on the test's deadline counts."""
        self.say({"start": nodeid})
        _inside().begin_test(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and tear-down are one result."""
        self._phases.append(report)
        if report.when != "teardown":
            return
        phases, self._phases = self._phases, []
        failed = [phase for phase in phases if phase.failed]
        skipped = [phase for phase in phases if phase.skipped]
        told = next(iter(failed or skipped), None)
        self.say(
            {
                "test": report.nodeid,
                "outcome": "failed" if failed else "skipped" if skipped else "passed",
                "message": _reason(told) if told else "",
                "text": told.longreprtext[-6000:] if told else "",
                "seconds": sum(phase.duration for phase in phases),
                "setup": phases[0].duration,
            }
        )


def _reason(report: pytest.TestReport) -> str:
    """What a failure says, without the traceback."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longreprtext).strip()


if __name__ == "__main__":
    main()
