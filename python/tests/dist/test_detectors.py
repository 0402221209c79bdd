"""Every detector is needed: taken out of the library, one by one, a test that is named here fails.

A test that hangs without its detector fails, too, after a few seconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
LIBRARY = HERE.parents[1] / "tinyllm"

OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-c", os.devnull]

# name: (file, what stands there, what it is replaced by, the test that must fail)
DETECTORS = {
    "the header of a chunk": (
        "port.py",
        "if not self._scratch.startswith(self.call.head):",
        "if False:",
        "test_desync.py::test_every_rank_learns_that_one_disagrees[another dtype-pipe]",
    ),
    "the header of a whole array": (
        "port.py",
        "if mine._replace(**free) != theirs:",
        "if False:",
        "test_port.py::test_arrays_that_travel_whole_must_agree_where_they_can[gather_dtypes]",
    ),
    "the header of a message that is too short": (
        "port.py",
        "if partly and not self._scratch.startswith(self.call.head):",
        "if False:",
        "test_port.py::test_a_message_that_is_too_short_is_told_by_its_header",
    ),
    "the mark on a card in shared memory": (
        "segment.py",
        "if numbers[its_mark] != mark:",
        "if False:",
        "test_desync.py::test_every_rank_learns_that_one_disagrees[another dtype-shm]",
    ),
    "a peer that is gone, in shared memory": (
        "segment.py",
        "            if gone:\n",
        "            if False:\n",
        "test_shm.py::test_a_rank_that_hangs_up_is_noticed",
    ),
    "the alarm, for a rank that waits": (
        "port.py",
        "if self._alarm[0] or diagnosis.dispute(entries):",
        "if diagnosis.dispute(entries):",
        "test_port.py::test_the_alarm_reaches_a_rank_that_waits",
    ),
    "the alarm, for a rank that comes later": (
        "port.py",
        "        if self._alarm[0]:\n",
        "        if False:\n",
        "test_desync.py::test_a_rank_that_comes_later_is_told_at_once[pipe]",
    ),
    "the board, where nobody sends": (
        "port.py",
        "if self._alarm[0] or diagnosis.dispute(entries):",
        "if self._alarm[0]:",
        "test_desync.py::test_where_nobody_sends_the_board_tells[pipe]",
    ),
    "calls of the same number": (
        "diagnosis.py",
        "_same_number(entries) or ",
        "",
        "test_desync.py::test_where_nobody_sends_the_board_tells[pipe]",
    ),
    "an early return": (
        "diagnosis.py",
        "_returned(entries) or ",
        "",
        "test_desync.py::test_every_rank_learns_that_one_disagrees[an early return-pipe]",
    ),
    "a message that will not come": (
        "diagnosis.py",
        "_missed(entries) or ",
        "",
        "test_desync.py::test_every_rank_learns_that_one_disagrees[a recv from afar-pipe]",
    ),
    "a message that was refused": (
        "diagnosis.py",
        " or _refused(entries)",
        "",
        "test_port.py::test_a_refused_message_is_shown_beside_the_call",
    ),
    "what is left over at the end": (
        "launch.py",
        "        if known:\n            raise DesyncError(f",
        "        if False:\n            raise DesyncError(f",
        "test_desync.py::test_what_is_left_over_at_the_end_is_told"
        "[message-rank 1: sent 1 to rank 0]",
    ),
    "a failed Comm": (
        "port.py",
        "            self.failed(error)\n",
        "            self.end()\n",
        "test_port.py::test_a_comm_stays_broken_and_says_why",
    ),
    "the limit of an operation": (
        "port.py",
        "if limit is None or now - self._since < limit:",
        "if True:",
        "test_desync.py::test_an_operations_own_limit_names_who_holds_it_up[pipe]",
    ),
    "the circle": (
        "diagnosis.py",
        "    if ring:\n",
        "    if False:\n",
        "test_desync.py::test_a_deadline_draws_the_circle",
    ),
    "a rank without a sign of life": (
        "diagnosis.py",
        "    if silent:\n",
        "    if False:\n",
        "test_faults.py::test_a_timeout_names_the_rank_that_is_stopped_inside_a_collective",
    ),
    "a peer that is lost is not the cause": (
        "child.py",
        "        return 2\n",
        "        return 0\n",
        "test_faults.py::test_a_dying_rank_is_named_with_its_end"
        "[hangs_up_before_it_dies-args9-9-rank 1 exited with code 9]",
    ),
    "a process that ends, whoever holds its pipes": (
        "launch.py",
        "        self._selector.register(member.watch, "
        "selectors.EVENT_READ, (self._on_end, member))\n",
        "",
        "test_faults.py::test_a_sleeper_does_not_hide_its_dead_parent",
    ),
    "a parent that is gone": (
        "child.py",
        "    leave_with_parent()\n",
        "    os.setpgid(0, 0)\n",
        "test_faults.py::test_ranks_end_with_a_parent_that_is_killed[linux]",
    ),
    "a main script without a guard": (
        "preflight.py",
        "    _check_main_guard(sys._getframe(2))\n",
        "",
        "test_faults.py::test_a_main_script_without_a_guard",
    ),
}


def run_without(name: str, folder: Path) -> tuple[int, str]:
    """Take one detector out of a copy of the library, and run the test that is to fail."""
    file, there, instead, test = DETECTORS[name]
    shutil.copytree(LIBRARY, folder / "tinyllm", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "tinyllm/dist" / file
    source = path.read_text()
    assert there in source, f"{file} has changed: say here what the detector looks like now"
    path.write_text(source.replace(there, instead))
    tests = folder / "tests/dist"
    shutil.copytree(HERE, tests, ignore=shutil.ignore_patterns("__pycache__", "test_detectors.py"))
    patience = 4 if "test_faults" in test else 2  # without it many hang; with it none takes long
    options = [*OPTIONS, f"--timeout={patience}", "--timeout-method=thread"]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tests), str(tests / test)],
        cwd=tests,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = run.communicate(timeout=60)
    finally:
        for process in psutil.process_iter():  # without a detector, ranks may stay behind
            with suppress(psutil.Error):
                if str(folder) in process.environ().get("PYTHONPATH", ""):
                    process.kill()
    return run.returncode, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of them, three at a time: most of them wait, and as they are to fail, load is no harm."""
    with ThreadPoolExecutor(3) as pool:
        return {
            name: pool.submit(run_without, name, tmp_path_factory.mktemp("without"))
            for name in DETECTORS
        }


@pytest.mark.parametrize("name", DETECTORS)
def test_without_it_a_test_fails(name: str, runs) -> None:
    code, said = runs[name].result()
    assert code == 1, said
    assert "1 failed" in said or "1 error" in said or "Timeout" in said
