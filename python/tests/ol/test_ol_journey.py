"""A learner's way through the module, from the wheel, in a folder of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
PLAIN = ROOT / "course/wheats/L11.2/plain_comm.py"
MODEL = ROOT / "python/tests/l11-2-comm"
COMM = "python/tinyllm/dist/comm.py"
OWN = "python/tests/l11-2-comm"


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """What the wheel installs, with nothing of this clone on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    wheel = next(folder.glob("*.whl"))
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


class Learner:
    """A repository, and `ol` in it."""

    def __init__(self, folder: Path, installed: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        self._env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed), "HOME": str(folder)}
        self._env["TMPDIR"] = str(self.temporary)

    def ol(self, *command: str, code: int = 0) -> str:
        """Run a command; expect its exit code; return what it printed."""
        run = subprocess.run(
            [sys.executable, "-m", "ol.cli", *command],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=110,
        )
        said = run.stdout + run.stderr
        assert run.returncode == code, said
        assert "\x1b" not in said, "colours in a pipe"
        return said

    def json(self, *command: str, code: int = 0) -> dict:
        """The same, as a machine reads it."""
        said = json.loads(self.ol(*command, "--json", code=code))
        assert (said["version"], said["exit_code"]) == (1, code)
        return dict(said)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A command that goes on in the background."""
        return subprocess.Popen(
            [sys.executable, "-m", "ol.cli", *command],
            cwd=self.folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def learner(tmp_path: Path, installed: Path) -> Iterator[Learner]:
    """Somebody in an empty folder; temporary files have a short path, for the sake of sockets."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Learner(tmp_path, installed, Path(temporary))


def test_from_the_empty_folder_to_the_reference(learner: Learner) -> None:
    # Where am I? Nowhere yet.
    assert "next: ol start L11.2" in learner.ol()
    assert "no python/tinyllm/dist/comm.py here" in learner.ol("check", "L11.2", code=2)
    assert "wrote    python/tinyllm/dist/comm.py" in learner.ol("start", "L11.2")
    assert "test_rank_error_propagates" in learner.ol("tests", "L11.2")

    # The stub fails, and says what is missing; the reference is not shown.
    said = learner.ol("check", "L11.2", code=1)
    assert "course tests on your file         0 of 10 pass" in said
    assert "NotImplementedError: chunk_bounds is yours to write" in said
    assert "_exchange" not in said, "code of the reference"
    assert "hint 1 of 3" in learner.ol("hint", "L11.2")
    assert "has not passed yet" in learner.ol("diff", "L11.2", code=3)

    # Somebody's finished comm.py, and tests that are worth something.
    shutil.copy(PLAIN, learner.folder / COMM)
    shutil.copytree(MODEL, learner.folder / OWN, dirs_exist_ok=True)
    said = learner.ol("check", "L11.2")
    assert "course tests on your file         10 of 10 pass" in said
    assert "also on 2 other right solutions" in said
    assert "pitfalls that your tests notice   12 of 12" in said
    assert "a sample; there are" in said
    assert "Passed." in said

    # The same once more, from what is known.
    started = time.monotonic()
    again = learner.json("check", "L11.2")
    assert again["passed"]
    assert time.monotonic() - started < 20, "the first time took longer than that"
    assert [v["status"] for v in again["pitfalls"]].count("survived") == 0
    assert learner.json("check", "L11.2", "--show", "s05")["pitfalls"][4]["id"] == "s05"
    assert "noticed by" in learner.ol("check", "L11.2", "--show", "s05")

    # Now the reference may be seen; an edit takes that back.
    functions = [d["function"] for d in learner.json("diff", "L11.2")["functions"]]
    assert functions[0] == "chunk_bounds"
    assert functions[-1] == "spawn"
    assert "the reference's Comm.all_reduce" in learner.ol("diff", "L11.2")
    with (learner.folder / COMM).open("a") as file:
        file.write("# one more thought\n")
    assert "has passed, but not as it is now" in learner.ol("diff", "L11.2", code=3)
    assert "next: ol check L11.2" in learner.ol()


def test_tests_that_notice_nothing(learner: Learner) -> None:
    learner.ol("start", "L11.2")
    (learner.folder / OWN / "test_example.py").write_text("def test_it():\n    assert True\n")
    found = learner.json("mutate", "L11.2", code=1)
    assert {v["status"] for v in found["pitfalls"]} == {"survived"}
    assert found["mutants"]["score"] == 0
    assert found["mutants"]["tried"] == found["mutants"]["of"] > 200
    assert not any("diff" in v for v in found["mutants"]["verdicts"]), "code of the reference"
    assert "None of your tests runs that line" in learner.ol("mutate", "L11.2", code=1)
    assert "Somebody's comm.py is wrong" in learner.ol("hint", "L11.2")


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("def test_it():\n    assert 1 == 2\n", "1 of your 1 tests fail on the reference"),
        ("", "has no test in it"),
        (
            "import pytest\n@pytest.mark.skip\ndef test_it():\n    pass\n",
            "skips all its tests",
        ),
        ("def test_(:\n", "SyntaxError"),
        (
            "from tinyllm.dist import comm\ndef test_it():\n    assert comm._bounds\n",
            "pass on the reference but fail on another solution (plain_comm.py)",
        ),
    ],
)
def test_a_suite_that_cannot_judge_gets_no_score(learner: Learner, test: str, said: str) -> None:
    learner.ol("start", "L11.2")
    (learner.folder / OWN / "test_example.py").write_text(test)
    out = learner.ol("mutate", "L11.2", code=4)
    assert said in " ".join(out.split())
    assert "0." not in out, "a score"
    assert learner.json("mutate", "L11.2", code=4)["error"]


def test_an_installed_package_is_never_judged_in_the_learners_place(learner: Learner) -> None:
    learner.ol("start", "L11.2")
    (learner.folder / "python/tinyllm/__init__.py").unlink()
    (learner.folder / "python/tinyllm/dist/__init__.py").unlink()
    said = learner.ol("check", "L11.2", code=5)
    assert "finds another file than the judged one" in said
    assert "is an __init__.py missing" in said


def test_tests_without_a_file_can_be_graded_but_not_checked(learner: Learner) -> None:
    learner.ol("start", "L11.2")
    (learner.folder / COMM).unlink()
    assert "there are tests, but no python/tinyllm/dist" in learner.ol("check", "L11.2", code=2)
    (learner.folder / OWN / "test_example.py").write_text("def test_it():\n    assert True\n")
    assert learner.json("mutate", "L11.2", code=1)["command"] == "mutate"


def test_a_folder_that_cannot_be_written_is_named(learner: Learner) -> None:
    learner.ol("start", "L11.2")
    (learner.folder / ".ol").write_text("in the way")
    said = learner.json("mutate", "L11.2", code=5)
    assert ".ol" in said["error"]


def test_ctrl_c_leaves_nothing_and_the_next_run_goes_on(learner: Learner) -> None:
    learner.ol("start", "L11.2")
    interrupted_after(learner, 20)
    kept = _judged(learner)
    assert len(kept) >= 20
    interrupted_after(learner, len(kept) + 20)
    again = _judged(learner)
    assert len(again) >= len(kept) + 20
    # Had they been judged again, their times would be others.
    assert {subject: again[subject] for subject in kept} == kept


def interrupted_after(learner: Learner, judged: int) -> None:
    """Grade until so many subjects are known, then press Ctrl-C; nothing may be left."""
    run = learner.start("mutate", "L11.2")
    patience = time.monotonic() + 60
    while time.monotonic() < patience and len(_judged(learner)) < judged:
        time.sleep(0.1)
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) >= 2
    assert list(learner.temporary.glob("ol-*"))
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "interrupted; what was judged so far is kept" in said
    _, alive = psutil.wait_procs(below, timeout=5)
    assert alive == []
    assert list(learner.temporary.glob("ol-*")) == []


def _judged(learner: Learner) -> dict:
    cache = learner.folder / ".ol/L11.2/own.json"
    return dict(json.loads(cache.read_text())["results"]) if cache.exists() else {}
