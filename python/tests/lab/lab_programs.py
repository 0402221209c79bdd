"""A lab's program as a learner runs it, and what its run leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LAB = Path(__file__).parents[3] / "course/labs/08-distributed-hpc/01-ring-allreduce"


class Program:
    """A run in a session of its own, so that all its processes can be found."""

    def __init__(self, *args, program=LAB / "solution.py", flags=("-I",), env=None):
        self.process = subprocess.Popen(
            [sys.executable, *flags, str(program), *args],
            env=env or {},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def outcome(self):
        """Exit code, stdout and stderr; and no process of it is left."""
        out, err = self.process.communicate(timeout=30)
        self.wait_until(lambda: not self.members())  # multiprocessing's tracker ends last
        return self.process.returncode, out, err

    def end(self):
        """Whatever the test came to, leave nothing of it."""
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def members(self):
        """The pids and command lines of its session that are still there."""
        table = subprocess.run(
            ["ps", "-axwwo", "pid=,stat=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in table.stdout.splitlines()]
        return {
            int(pid): args
            for pid, state, args in rows
            if state[0] != "Z" and session(int(pid)) == self.process.pid
        }

    def ranks(self, world):
        """The pids of all ranks, as soon as they have been started."""
        found = []

        def started():
            found[:] = sorted(pid for pid, args in self.members().items() if "spawn_main" in args)
            return len(found) == world

        self.wait_until(started)
        return found

    @staticmethod
    def wait_until(true, seconds=10):
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def session(pid):
    """The session of a process, if it is still there."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
