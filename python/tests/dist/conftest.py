"""After every test of this folder: no process, descriptor or thread more than before it."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import time
from multiprocessing import forkserver, resource_tracker

import pytest


def children() -> set[int]:
    """This process's children, but for the two helpers that multiprocessing keeps for itself."""
    table = subprocess.run(["ps", "-axo", "pid=,ppid=,comm="], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in table.stdout.splitlines()]
    mine = {int(pid) for pid, ppid, name in rows if int(ppid) == os.getpid() and name != "ps"}
    helpers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    return mine - helpers


def descriptors() -> list[str]:
    """What each open descriptor leads to, as far as the system tells."""
    links = [f"/dev/fd/{fd}" for fd in os.listdir("/dev/fd")]
    return sorted(os.path.realpath(link) for link in links if os.path.exists(link))


@pytest.fixture(scope="module", autouse=True)
def _what_other_modules_left():
    """Collect it before the first test counts, or it is missed after that test."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    resource_tracker.ensure_running()  # its descriptor is its own, and stays
    opened, threads = descriptors(), threading.active_count()
    before = children()
    yield
    deadline = time.monotonic() + 2  # a thread needs a moment to end
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    gc.collect()  # a Comm and its links know each other
    assert children() <= before
    in_one_process = {"in_threads", "on_empty_links"} & vars(request.module).keys()
    if not in_one_process:  # there, a caught error may hold a Comm alive
        assert descriptors() == opened
    assert threading.active_count() == threads
