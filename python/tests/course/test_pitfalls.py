"""The course judged: each pitfall, put into the reference, fails the test that is named for it.

(That the reference and the plain comm.py pass all ten, course/tests and test_ol show.)  Each runs
in an empty environment, with bare pytest, from a folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COURSE = ROOT / "course"
REFERENCE = ROOT / "python/tinyllm/dist"
PITFALLS = sorted((COURSE / "mutants/L11.2").glob("s*.toml"))
TEN = re.findall(r"^def (test_\w+)", (COURSE / "tests/L11.2/test_comm.py").read_text(), re.M)
CHAPTER = (COURSE / "chapters/L11.2.md").read_text()


def library_with(folder: Path, comm: str) -> Path:
    """A folder that holds the reference's ``tinyllm.dist`` with this comm.py in it."""
    dist = folder / "tinyllm/dist"
    shutil.copytree(REFERENCE, dist, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REFERENCE.parent / "__init__.py", dist.parent)
    (dist / "comm.py").write_text(comm)
    return folder


def course_tests(library: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run the course tests against the comm.py in ``library`` with bare pytest."""
    tests = COURSE / "tests/L11.2/test_comm.py"
    chosen = [f"{tests}::{name}" for name in names] or [str(tests)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(library)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen],
        capture_output=True,
        text=True,
        cwd=library,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=100,
    )


def run_with(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Put a pitfall into the reference, and run the test that is named for it."""
    pitfall = tomllib.loads(path.read_text())
    source = (REFERENCE / "comm.py").read_text()
    assert source.count(pitfall["old"]) == 1
    assert max(pitfall["old"].count("\n"), pitfall["new"].count("\n")) <= 3
    faulty = source.replace(pitfall["old"], pitfall["new"])
    return course_tests(library_with(folder, faulty), pitfall["caught_by"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All twelve, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return {
            path: pool.submit(run_with, path, tmp_path_factory.mktemp(path.stem))
            for path in PITFALLS
        }


@pytest.mark.parametrize("path", PITFALLS, ids=lambda path: path.stem)
def test_a_pitfall_fails_the_test_that_is_named_for_it(path: Path, runs) -> None:
    run = runs[path].result()
    assert run.returncode == 1, run.stdout
    assert "1 failed" in run.stdout
    assert "expected" in run.stdout, "the failure does not say what was expected"


def test_the_ten_and_the_twelve_are_the_chapters() -> None:
    checks = re.findall(r"^\| `(test_\w+)` \|", CHAPTER, re.M)
    assert checks == TEN
    assert len(TEN) == 10
    rows = re.findall(r"^\| \d+ \| .* \| `(test_\w+)` \| (s\d\d) \|", CHAPTER, re.M)
    assert rows == [(tomllib.loads(p.read_text())["caught_by"], p.stem) for p in PITFALLS]
    assert len(rows) == 12
