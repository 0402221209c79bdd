"""What goes wrong in ranks: soon, under the right rank's name, with nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import dist_faults as faults
import numpy as np
import pytest
from dist_worlds import MESHES, OTHERS

from tinyllm.dist import CommTimeout, DesyncError, RankDied, RankError
from tinyllm.dist.comm import spawn

pytestmark = pytest.mark.usefixtures("_fork_server")
HERE = Path(__file__).parent
NOVEL = 64 * 1024


def failure_of(kind, fn, *args, world: int = 3, **options):
    """The error of a run that must end at once: its limit is far beyond what this takes."""
    options = {"method": "forkserver"} | options  # where the start is not the point, a quick one
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        spawn(fn, world, *args, timeout=60, **options)
    assert time.monotonic() - start < 20
    return caught.value


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (faults.raises, "rank 1 raised ValueError: boom at 7"),
        (faults.raises_stubborn, "rank 1 raised dist_faults.Stubborn: boom (42)"),
        (faults.raises_unpicklable, "Local"),
        (faults.raises_unprintable, "Mute: <exception str() failed>"),
        (faults.returns_what_does_not_pickle, "the result, a function, cannot go to the parent"),
        (faults.raises_odd, "Odd"),
        (faults.raises_ours_with_a_lock, "CommError: planned"),
    ],
)
def test_a_raising_rank_is_named_with_its_traceback(fn, says: str) -> None:
    error = failure_of(RankError, fn)
    assert says in str(error)
    assert error.rank == 1
    assert fn is faults.raises_odd or "Traceback (most recent call last)" in str(error)
    assert error.traceback_text in str(error)
    assert fn is faults.returns_what_does_not_pickle or "child.py" not in str(error)


def test_a_novel_of_a_message_is_cut() -> None:
    error = failure_of(RankError, faults.raises_a_novel)
    assert "first words" in str(error)
    assert "last words" in str(error)
    assert "characters left out" in str(error)
    assert len(str(error)) < 2 * NOVEL


def test_the_first_failure_is_the_headline() -> None:
    error = failure_of(RankError, faults.all_fail)
    assert str(error).startswith("rank 1 raised ValueError: from rank 1")


DEATHS = pytest.mark.parametrize(
    ("fn", "args", "exitcode", "says"),
    [
        (faults.exits, (0,), None, "rank 1 exited before its function returned: SystemExit: 0"),
        (faults.exits, (3,), None, "SystemExit: 3"),
        (faults.exits, ("out of disk",), None, "SystemExit: out of disk"),
        (faults.is_interrupted, (), None, "KeyboardInterrupt"),
        (faults.dies, (0,), 0, "rank 1 exited with code 0 before its function returned"),
        (faults.dies, (3,), 3, "exited with code 3"),
        (faults.is_killed, (signal.SIGKILL,), -9, "killed by SIGKILL (out of memory?)"),
        (faults.is_killed, (signal.SIGSEGV,), -11, "killed by SIGSEGV"),
        (faults.loses_a_peer_and_says_something_else, (), 9, "rank 1 exited with code 9"),
        (faults.hangs_up_before_it_dies, (), 9, "rank 1 exited with code 9"),
        (faults.groups_its_errors, (), 9, "rank 1 exited with code 9"),
    ],
)


def assert_death_is_told(fn, args, exitcode, says: str, **options) -> None:
    error = failure_of(RankDied, fn, *args, **options)
    assert str(error).startswith("rank 1 ")
    assert says in str(error)
    assert (error.rank, error.exitcode) == (1, exitcode)


@DEATHS
def test_a_dying_rank_is_named_with_its_end(fn, args, exitcode, says: str) -> None:
    assert_death_is_told(fn, args, exitcode, says)


def assert_sleeper_hides_nothing(pid_file: Path, **options) -> None:
    error = failure_of(RankDied, faults.leaves_a_sleeper, str(pid_file), **options)
    assert (error.rank, error.exitcode) == (1, 5)
    assert_gone(int(pid_file.read_text()))


def test_a_sleeper_does_not_hide_its_dead_parent(tmp_path: Path) -> None:
    assert_sleeper_hides_nothing(tmp_path / "pid")


def test_a_helper_that_left_the_group_keeps_nobody_waiting(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    start = time.process_time()
    error = failure_of(RankDied, faults.daemonises_a_helper_and_dies, str(pid_file))
    assert (error.rank, error.exitcode) == (1, 5)
    assert time.process_time() - start < 1, "the parent was busy waiting"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # it left on purpose; we end it here


def test_the_parent_rests_while_it_waits() -> None:
    start = time.process_time()
    spawn(faults.sleeps, 2, 1.0)
    assert time.process_time() - start < 0.5


@pytest.mark.usefixtures("_fork_server")
def test_a_fork_that_comes_back_does_not_count() -> None:
    for method in ("spawn", "forkserver"):
        assert spawn(faults.forks_and_returns_twice, 3, method=method) == [0, 1, 2]


def test_a_rank_ends_as_an_interpreter_does(tmp_path: Path, capfd) -> None:
    assert spawn(faults.leaves_things_to_the_end, 2, str(tmp_path)) == [0, 1]
    assert capfd.readouterr().out == "printedprinted"
    for rank in range(2):
        assert (tmp_path / f"{rank}.log").read_text() == "important"
        assert (tmp_path / f"{rank}.atexit").exists()
        assert (tmp_path / f"{rank}.thread").exists()


def test_a_nested_failure_is_the_outer_ranks() -> None:
    error = failure_of(RankError, faults.nests_a_failure)
    assert error.rank == 2
    assert "RankDied: rank 1 exited with code 6" in str(error)


@pytest.mark.usefixtures("_fork_server")
def test_ranks_of_a_fork_server_have_random_numbers_of_their_own() -> None:
    assert len(set(spawn(faults.draws, 3, method="forkserver"))) == 3


def test_a_very_long_limit() -> None:
    assert spawn(faults.takes, 1, timeout=10**400) == [0]
    assert spawn(faults.takes, 1, timeout=1e9) == [0]


def test_a_rank_that_cannot_start() -> None:
    ghost = types.ModuleType("ghost")
    exec("def fn(comm): ...", ghost.__dict__)
    sys.modules["ghost"] = ghost
    try:
        error = failure_of(RankError, ghost.fn)
    finally:
        del sys.modules["ghost"]
    assert "while starting ModuleNotFoundError: No module named 'ghost'" in str(error)
    error = failure_of(RankError, faults.takes, faults.OneWay())
    assert "while starting ImportError: not here" in str(error)


def test_a_rank_that_dies_while_starting(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "trapdoor.py").write_text(
        "import multiprocessing, os\n"
        "if multiprocessing.parent_process(): os._exit(7)\n"
        "def fn(comm): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import trapdoor

    error = failure_of(RankDied, trapdoor.fn)
    assert "exited with code 7 while starting" in str(error)


def test_a_result_that_does_not_unpickle_here() -> None:
    error = failure_of(RankError, faults.returns_one_way)
    assert "does not unpickle in the parent: not here" in str(error)


def test_large_arguments_and_results_travel() -> None:
    x = np.arange(4_000_000.0)  # 32 MB to each rank and back; a socket holds 0.2
    for rank, got in enumerate(spawn(faults.echoes, 3, x)):
        assert np.array_equal(got, x + rank)


def test_much_output_does_not_block() -> None:
    assert spawn(faults.chatters, 2) == [0, 1]


def test_a_timeout_lists_the_ranks_that_are_late() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        spawn(faults.sleeps, 3, 60.0, timeout=1.5, method="forkserver")
    assert time.monotonic() - start < 1.5 + 1
    assert isinstance(caught.value, CommTimeout)
    assert "3 of 3 ranks had not returned from sleeps after 1.5 s" in str(caught.value)
    assert "rank 0 is in barrier #1, waiting for a message from rank 2" in str(caught.value)
    assert "rank 1 is in its own code (no operation yet)" in str(caught.value)


def assert_stuck_is_told(how: str, limit: float, **options) -> None:
    start = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        spawn(faults.is_stuck, 3, how, timeout=limit, **options)
    assert time.monotonic() - start < limit + 1
    said = str(caught.value)
    assert caught.value.rank == 1, said
    assert "rank 1 not done, and others wait" in said
    assert "rank 0 is in barrier #2" in said
    if how != "stopped":
        assert "rank 1 is at\n" in said
        assert "dist_faults.py" in said.partition("rank 1 is at")[2]
        assert "in is_stuck" in said


@pytest.mark.parametrize("how", ["looping", "stopped", "in C"])
def test_a_timeout_names_the_rank_that_is_stuck(how: str) -> None:
    assert_stuck_is_told(how, 1.5, method="forkserver")


def assert_stopped_is_told(limit: float, **options) -> None:
    with pytest.raises(CommTimeout) as caught:
        spawn(faults.is_stopped_in_a_collective, 3, timeout=limit, **options)
    assert caught.value.rank == 1
    assert "rank 1 shows no sign of life: stopped, or stuck in C" in str(caught.value)


def test_a_timeout_names_the_rank_that_is_stopped_inside_a_collective() -> None:
    assert_stopped_is_told(1.5, method="forkserver")


def test_a_rank_may_spawn() -> None:
    assert spawn(faults.spawns, 2) == [[0, 0], [1, 1]]


def test_two_spawns_at_once_from_threads() -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(spawn, faults.sleeps, world, 0.2) for world in (2, 3)]
        failing = pool.submit(spawn, faults.dies, 2, 3)
        assert [run.result() for run in runs] == [[0, 1], [0, 1, 2]]
        with pytest.raises(RankDied, match="exited with code 3"):
            failing.result()


def test_no_limit_and_enough_time() -> None:
    assert spawn(faults.sleeps, 2, 0.2, timeout=None) == [0, 1]
    assert spawn(faults.sleeps, 2, 0.2, timeout=float("inf")) == [0, 1]
    assert spawn(faults.sleeps, np.int64(2), 0.0, timeout=np.float64(60)) == [0, 1]


def test_ranks_in_different_calls_are_told_so() -> None:
    error = failure_of(DesyncError, faults.uses_a_broken_comm, world=2)
    assert "all_reduce #1 (float64[3], sum)" in str(error)
    assert "broadcast #1 (float64[3], src 0)" in str(error)


def test_a_rank_that_outstays_its_result_is_ended() -> None:
    with pytest.warns(RuntimeWarning, match="rank 1 returned, but did not exit within 1 s"):
        assert spawn(faults.outstays, 2) == [0, 1]


@pytest.fixture(scope="module")
def _fork_server():
    """Start it outside the test that counts descriptors: one stays open for the server."""
    spawn(faults.takes, 1, method="forkserver")


# -- over other meshes: what the links and their rendezvous have a part in -------------------------


@pytest.fixture(params=OTHERS)
def other(request, _fork_server) -> dict:
    """How to spawn over another mesh, soon."""
    return {"mesh": MESHES[request.param], "method": "forkserver"}


def test_over_it_a_raising_rank_is_named(other: dict) -> None:
    error = failure_of(RankError, faults.raises, **other)
    assert error.rank == 1
    assert "rank 1 raised ValueError: boom at 7" in str(error)


@DEATHS
def test_over_it_a_dying_rank_is_named(other: dict, fn, args, exitcode, says: str) -> None:
    assert_death_is_told(fn, args, exitcode, says, **other)


def test_over_it_a_sleeper_does_not_hide_its_dead_parent(other: dict, tmp_path: Path) -> None:
    assert_sleeper_hides_nothing(tmp_path / "pid", **other)


def test_over_it_a_rank_cannot_start(other: dict) -> None:
    error = failure_of(RankError, faults.takes, faults.OneWay(), **other)
    assert "while starting ImportError: not here" in str(error)


def test_over_it_a_timeout_names_the_rank_that_is_stuck(other: dict) -> None:
    assert_stuck_is_told("looping", 1.2, **other)


def test_over_it_a_timeout_names_the_rank_that_is_stopped_inside(other: dict) -> None:
    assert_stopped_is_told(1.3, **other)


def test_over_it_ranks_in_different_calls_are_told_so(other: dict) -> None:
    error = failure_of(DesyncError, faults.uses_a_broken_comm, world=2, **other)
    assert "all_reduce #1 (float64[3], sum)" in str(error)


def test_over_it_large_arguments_and_results_travel(other: dict) -> None:
    x = np.arange(1_000_000.0)
    for rank, got in enumerate(spawn(faults.echoes, 3, x, **other)):
        assert np.array_equal(got, x + rank)


# -- ways to start, and scripts --------------------------------------------------------------------


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_run_by_either_method(method: str) -> None:
    assert spawn(faults.takes, 2, 1, 2, method=method) == [2, 2]
    error = failure_of(RankDied, faults.is_killed, signal.SIGKILL, method=method)
    assert (error.rank, error.exitcode) == (1, -9)


# -- scripts: what a main module may be, and who is left when it is killed -------------------------

BARE = """
    import fcntl, os
    for module, name in (os, "pidfd_open"), (os, "memfd_create"), (fcntl, "F_SETSIG"):
        if hasattr(module, name):
            delattr(module, name)
"""


def script(folder: Path, text: str, *, bare: bool = False, stdin: bool = False):
    """Start a main script, with or without what Linux has and other systems have not."""
    folder.mkdir(exist_ok=True)
    path = folder / "main.py"
    path.write_text(textwrap.dedent(text))
    (folder / "sitecustomize.py").write_text(textwrap.dedent(BARE) if bare else "")
    paths = [str(folder), str(HERE), str(HERE.parents[1])]
    return subprocess.Popen(
        ["sh", "-c", f"exec {sys.executable} - < {path}"] if stdin else [sys.executable, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def run_script(folder: Path, text: str, **how) -> tuple[int, str, str]:
    process = script(folder, text, **how)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def group(session: int) -> list[str]:
    """The processes of a script that still live, whatever group they have moved to."""
    table = subprocess.run(["ps", "-axo", "sess=,stat=,pid="], capture_output=True, text=True)
    rows = [line.split() for line in table.stdout.splitlines()]
    return [pid for sess, stat, pid in rows if sess == str(session) and "Z" not in stat]


def assert_gone(pid: int, within: float = 2.0) -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_main_script_without_a_guard(tmp_path: Path) -> None:
    code, _, err = run_script(
        tmp_path,
        """
        from tinyllm.dist.comm import spawn
        def fn(comm): return comm.rank
        print(spawn(fn, 2))
        """,
    )
    assert code == 1
    assert "main.py, line 4 runs again in every rank" in err
    assert 'if __name__ == "__main__":' in err
    assert err.count("Traceback") == 1


GUARDS = {
    "inside try": 'try:\n    if __name__ == "__main__": run()\nfinally: pass',
    "a name for it": 'MAIN = __name__ == "__main__"\nif MAIN: run()',
    "elif": 'if __name__ == "x": pass\nelif __name__ == "__main__": run()',
    "and": '__name__ == "__main__" and run()',
    "match": 'match __name__:\n    case "__main__": run()',
    "several lines": 'if (\n    __name__ == "__main__"\n):\n    (\n        run()\n    )',
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_may_take_any_form(tmp_path: Path, guard: str) -> None:
    head = "import dist_faults\nfrom tinyllm.dist.comm import spawn\n"
    head += "def run(): print(spawn(dist_faults.takes, 1, 2))\n"
    assert run_script(tmp_path, head + GUARDS[guard]) == (0, "[1]\n", "")


def test_a_main_on_standard_input_may_spawn_what_a_module_has(tmp_path: Path) -> None:
    text = "import dist_faults\nfrom tinyllm.dist.comm import spawn\n"
    text += "print(spawn(dist_faults.takes, 2, 5))\n"
    assert run_script(tmp_path, text, stdin=True) == (0, "[1, 1]\n", "")


@pytest.mark.parametrize("bare", [False, True], ids=["linux", "bare"])
def test_a_main_script_with_a_guard(tmp_path: Path, bare: bool) -> None:
    code, out, err = run_script(
        tmp_path,
        """
        import dist_faults
        from tinyllm.dist.comm import spawn
        from tinyllm.dist import RankDied
        def fn(comm): return float(comm.all_reduce(comm.rank + 0.5))
        if __name__ == "__main__":
            print(spawn(fn, 3))
            try:
                spawn(dist_faults.dies, 3, 7)
            except RankDied as error:
                print(error.rank, error.exitcode)
        """,
        bare=bare,
    )
    assert (code, out.splitlines(), err) == (0, ["[4.5, 4.5, 4.5]", "1 7"], "")


def test_a_daemon_may_not_spawn_and_a_start_method_does_not_matter(tmp_path: Path) -> None:
    code, out, err = run_script(
        tmp_path,
        """
        import multiprocessing
        import dist_faults
        from tinyllm.dist.comm import spawn
        def daemon():
            try:
                spawn(dist_faults.takes, 2)
            except RuntimeError as error:
                print(error, flush=True)
        if __name__ == "__main__":
            multiprocessing.set_start_method("fork")
            print(spawn(dist_faults.takes, 2, 1, 2), flush=True)
            process = multiprocessing.Process(target=daemon, daemon=True)
            process.start()
            process.join()
        """,
    )
    first, second = out.splitlines()
    assert (code, first, err) == (0, "[2, 2]", "")
    assert "spawn: a daemon process may have no children" in second


def test_a_function_on_standard_input(tmp_path: Path) -> None:
    code, _, err = run_script(
        tmp_path,
        """
        from tinyllm.dist.comm import spawn
        def fn(comm): return comm.rank
        if __name__ == "__main__":
            spawn(fn, 2)
        """,
        stdin=True,
    )
    assert code == 1
    assert "put it into a module" in err.splitlines()[-1]


@pytest.mark.parametrize("delay", [0.2, 0.3, 0.4, 0.6, 1.0])
def test_ctrl_c_is_one_interrupt_in_the_parent(tmp_path: Path, delay: float) -> None:
    process = script(
        tmp_path,
        """
        import dist_faults
        from tinyllm.dist.comm import spawn
        if __name__ == "__main__":
            try:
                spawn(dist_faults.sleeps, 4, 60.0)
            except KeyboardInterrupt:
                print("interrupted")
        """,
    )
    time.sleep(delay)  # from before the ranks start until they run
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    if out:  # else it came before the script did
        assert (process.returncode, out, err) == (0, "interrupted\n", "")
    deadline = time.monotonic() + 2  # multiprocessing's own helper takes a moment to leave
    while group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not group(process.pid)


@pytest.mark.parametrize("how", ["linux", "bare", "forkserver", "bare forkserver"])
def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path, how: str) -> None:
    method = "forkserver" if "forkserver" in how else "spawn"
    process = script(
        tmp_path,
        f"""
        import os, subprocess, time
        from tinyllm.dist.comm import spawn
        def fn(comm):
            child = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
            os.write(1, f"{{os.getpid()}} {{child.pid}}\\n".encode())
            if comm.rank == 0:
                comm.recv(1)
            while True: pass
        if __name__ == "__main__":
            spawn(fn, 2, method={method!r})
        """,
        bare="bare" in how,
    )
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.kill()
    try:
        assert len(pids) == 4
        for pid in pids:
            assert_gone(pid)
    finally:  # whatever went wrong, the test leaves nobody behind
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
