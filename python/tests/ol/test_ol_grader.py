"""The grader on a toy: verdicts, hangs, leftovers, wrong files, what is run again and what not."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
import pytest
from toy import CORE, SUITE, changed, grader

from ol import report
from ol.mutants import Subject
from ol.runner import Run, Runner, RunnerError, WrongFileError

REFERENCE = Subject("reference", CORE)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes with this word in their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


def test_each_change_is_judged_by_the_tests_that_reach_it(tmp_path: Path) -> None:
    subjects = [
        changed("2 * x", "3 * x", "value"),
        changed("x + ONE", "x - ONE", "other"),
        changed("process.join()", "pass", "unseen"),
        changed("import multiprocessing\n", "import nowhere_at_all\n", "unimportable"),
    ]
    subjects = [Subject(s.id, s.source, frozenset(_lines(s))) for s in subjects]
    with grader(tmp_path) as toy:
        base = toy.baseline(REFERENCE)
        verdicts = {v.subject.id: v for v in toy.judge("changes", subjects, base)}
    assert (base.method, len(base.passed)) == ("forkserver", 3)
    assert verdicts["value"].test == "test_toy.py::test_double"
    assert "assert 9 == 6" in verdicts["value"].message
    assert len(verdicts["value"].reached) == 3, "in one process, in ranks, and in one once more"
    assert verdicts["other"].reached == ("test_toy.py::test_add_one",)
    assert verdicts["unseen"].status == "survived"
    assert verdicts["unseen"].reached == ("test_toy.py::test_ranks",)
    assert verdicts["unimportable"].status == "killed"
    assert "nowhere_at_all" in verdicts["unimportable"].message


def _lines(subject: Subject) -> set[int]:
    pairs = zip(CORE.splitlines(), subject.source.splitlines(), strict=True)
    return {n for n, (old, new) in enumerate(pairs, 1) if old != new}


HANGS = {
    "deadlock": ("pipe.send((rank, double(rank)))", "pipe.recv()"),
    "loop": ("    return 2 * x", "    while True: pass"),
    "stopped": ("    return 2 * x", "    import os; os.kill(os.getpid(), 19)"),
}


def test_hangs_are_bounded_explained_and_cleared_away(tmp_path: Path) -> None:
    began = time.time()
    subjects = [changed(*change, kind) for kind, change in HANGS.items()]
    with grader(tmp_path) as toy:
        base = toy.baseline(REFERENCE)
        started = time.monotonic()
        verdicts = toy.judge("hangs", subjects, base)
        seconds = time.monotonic() - started
    assert [v.status for v in verdicts] == ["timeout"] * 3
    assert 9 <= seconds < 30, "each one second, then alone two"
    deadlock, loop, stopped = [[report.where(s) for s in v.stacks] for v in verdicts]
    assert any("in _rank, core.py:11" in line for line in deadlock), deadlock
    assert any("process of the tests is in ranks, core.py:" in line for line in deadlock), deadlock
    assert any("is in double, core.py:7" in line for line in loop), loop
    assert any("did not answer; the system says it is stopped" in line for line in stopped), stopped
    assert not [p for p in psutil.Process().children(recursive=True) if p.create_time() > began]


def test_a_sleeper_that_leaves_its_group_is_ended(tmp_path: Path) -> None:
    mark = f"sleeper-{time.time_ns()}"
    detached = (
        "import os, subprocess, sys\n"
        "    code = 'import time; time.sleep(300)'\n"
        f"    subprocess.Popen([sys.executable, '-c', code, '{mark}'], start_new_session=True)\n"
        "    return 2 * x"
    )
    with grader(tmp_path) as toy:
        base = toy.baseline(REFERENCE)
        [verdict] = toy.judge("sleeper", [changed("return 2 * x", detached)], base)
        assert verdict.status == "survived"
        assert marked(mark) == []


def test_a_test_that_takes_its_process_along_is_a_kill_of_that_test(tmp_path: Path) -> None:
    with grader(tmp_path) as toy:
        base = toy.baseline(REFERENCE)
        exits = changed("    return x + ONE", "    import os; os._exit(0)")
        [verdict] = toy.judge("exit", [exits], base)
    assert (verdict.status, verdict.test) == ("killed", "test_toy.py::test_add_one")
    assert "ended in the middle" in verdict.message


@pytest.mark.parametrize("where", ["parent", "ranks"])
def test_another_file_is_never_judged_in_its_place(tmp_path: Path, where: str) -> None:
    other = tmp_path / "elsewhere/toy"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    (other / "core.py").write_text(CORE)
    cheat = f"\nimport sys\nsys.path.insert(0, {str(other.parent)!r})\n"
    suite = cheat + SUITE if where == "parent" else SUITE + cheat
    with grader(tmp_path, suite) as toy, pytest.raises(WrongFileError, match="elsewhere"):
        toy.baseline(REFERENCE)


def test_only_what_an_edit_can_change_is_run_again(tmp_path: Path, monkeypatch) -> None:
    ran: list[tuple[str, ...]] = []
    run = Runner.run

    def counted(self, job) -> Run:
        ran.append(job.chosen)
        return run(self, job)

    monkeypatch.setattr(Runner, "run", counted)
    wrong = [changed("2 * x", "3 * x", "a"), changed("process.join()", "pass", "b")]

    def grade(suite: str, engine: str = "1") -> list[str]:
        ran.clear()
        with grader(tmp_path, suite, engine) as toy:
            base = toy.baseline(REFERENCE)
            return [v.status for v in toy.judge("again", wrong, base)]

    assert grade(SUITE) == ["killed", "survived"]
    assert grade(SUITE) == ["killed", "survived"]
    assert ran == []
    edited = SUITE.replace("add_one(1) == 2", "add_one(2) == 3")
    assert grade(edited) == ["killed", "survived"]
    one = ("test_toy.py::test_add_one",)
    assert ran == [(), one, one], "collected; on the reference; on the survivor"
    ran.clear()
    assert grade(SUITE + "\nHELPER = 1\n") == ["killed", "survived"]
    assert len(ran[1]) == 3, "something shared changed: all tests"
    assert grade(SUITE + "\nHELPER = 1\n", engine="2") == ["killed", "survived"]
    assert len(ran[1]) == 3, "another engine: all tests"


def test_a_suite_that_insists_on_details_fails_on_another_solution(tmp_path: Path) -> None:
    nosy = SUITE + "\n\ndef test_private():\n    import toy.core\n    assert toy.core._rank\n"
    with grader(tmp_path, nosy) as toy:
        base = toy.baseline(REFERENCE)
        other = Subject("other", CORE.replace("_rank", "_entry"))
        assert [r.test for r in toy.on_another(other, base)] == ["test_toy.py::test_private"]


def test_a_suite_that_needs_real_spawn_gets_it(tmp_path: Path) -> None:
    picky = SUITE + (
        "\n\ndef test_method():\n    import multiprocessing\n"
        "    assert type(multiprocessing.get_context('spawn')).__name__ == 'SpawnContext'\n"
    )
    with grader(tmp_path, picky) as toy:
        base = toy.baseline(REFERENCE)
        assert (base.method, len(base.passed), base.failed) == ("spawn", 4, [])
        [verdict] = toy.judge("value", [changed("2 * x", "3 * x")], base)
        assert verdict.killed


def test_a_red_suite_says_what_failed(tmp_path: Path) -> None:
    with grader(tmp_path, SUITE.replace("== 6", "== 7")) as toy:
        base = toy.baseline(REFERENCE)
    assert [r.test for r in base.failed] == ["test_toy.py::test_double"]
    assert "assert 6 == 7" in base.failed[0].message


def test_a_suite_that_does_not_parse_is_red(tmp_path: Path) -> None:
    with grader(tmp_path, "def test_(:\n") as toy:
        base = toy.baseline(REFERENCE)
    assert [r.outcome for r in base.failed] == ["broken"]
    assert "SyntaxError" in base.failed[0].message


def test_a_worker_that_cannot_start_is_no_verdict(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ol.runner._HERE", tmp_path / "ol")  # nothing of ours on its path
    monkeypatch.setenv("PYTHONPATH", "")
    runner = Runner(["pytest"], 1)
    # Where `ol` is installed the worker starts, and finds that it would see nothing from inside.
    known = "No module named|is not the grader's"
    with grader(tmp_path, runner=runner) as toy, pytest.raises(RunnerError, match=known):
        toy.baseline(REFERENCE)


def test_a_test_that_needs_another_one_is_found_before_it_judges(tmp_path: Path) -> None:
    needy = "SEEN = []\n" + SUITE + "    SEEN.append(1)\n\n\ndef test_needy():\n    assert SEEN\n"
    with grader(tmp_path, needy) as toy:
        base = toy.baseline(REFERENCE)
        assert base.failed == []
        [failure] = toy.out_of_order(REFERENCE, base)
    assert failure.test == "test_toy.py::test_needy"


def test_what_a_fixture_computed_for_an_earlier_test_still_counts(tmp_path: Path) -> None:
    shared = (
        "import pytest\nfrom toy.core import double\n\n\n"
        "@pytest.fixture(scope='module')\ndef six():\n    return double(3)\n\n\n"
        "def test_first(six):\n    assert six\n\n\ndef test_second(six):\n    assert six == 6\n"
    )
    wrong = changed("2 * x", "3 * x")
    subject = Subject(wrong.id, wrong.source, frozenset(_lines(wrong)))
    with grader(tmp_path, shared) as toy:
        [verdict] = toy.judge("fixture", [subject], toy.baseline(REFERENCE))
    assert verdict.test == "test_toy.py::test_second"
    assert verdict.reached == ("test_toy.py::test_first",)


ODD = {
    "ranks that print more than a pipe holds": (
        "    pipe.send((rank, double(rank)))",
        "    print('x' * 300_000, flush=True)\n    pipe.send((rank, double(rank)))",
        "survived",
    ),
    "a rank that kills its group": (
        "    pipe.send((rank, double(rank)))",
        "    import os; os.killpg(0, 9)",
        "killed",
    ),
    "an exit at the import": ("import multiprocessing\n", "import os; os._exit(0)\n", "killed"),
    "temporary files": (
        "    return 2 * x",
        "    import tempfile; tempfile.mkstemp(prefix='left-by-a-test'); return 2 * x",
        "survived",
    ),
}


def test_odd_programs_harm_neither_the_grader_nor_the_machine(tmp_path: Path) -> None:
    subjects = [changed(old, new, name) for name, (old, new, _) in ODD.items()]
    with grader(tmp_path) as toy:
        base = toy.baseline(REFERENCE)
        verdicts = toy.judge("odd", subjects, base)
    assert {v.subject.id: v.status for v in verdicts} == {n: odd[2] for n, odd in ODD.items()}
    assert not list(Path(tempfile.gettempdir()).glob("left-by-a-test*"))


def test_what_failed_on_a_right_solution_is_tried_again(tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    suite = f"from os.path import exists\n{SUITE}\n\ndef test_b():\n"
    suite += f"    assert not exists({str(trouble)!r})\n"
    trouble.touch()
    with grader(tmp_path, suite) as toy:
        assert [r.test for r in toy.baseline(REFERENCE).failed] == ["test_toy.py::test_b"]
    trouble.unlink()
    with grader(tmp_path, suite) as toy:
        assert toy.baseline(REFERENCE).failed == []


def test_a_baseline_goes_on_after_a_test_that_ends_its_process(tmp_path: Path) -> None:
    with grader(tmp_path, "def test_exit():\n    import os; os._exit(0)\n" + SUITE) as toy:
        base = toy.baseline(REFERENCE)
    assert [r.test for r in base.failed] == ["test_toy.py::test_exit"]
    assert len(base.passed) == 3
