"""`ol`: the catalogue is the chapter's, and check judges the file in front of it and no other."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ol import catalogue, judge
from ol.cli import main

ROOT = Path(__file__).parents[3]
PLAIN = ROOT / "course/wheats/L11.2/plain_comm.py"

STUB = """
def chunk_bounds(n, world):
    return [(0, n)]

class Comm: ...

def spawn(fn, world, *args, timeout=60.0):
    return [None] * world
"""


def learner(folder: Path, comm: str) -> Path:
    """A learner's repository with this comm.py."""
    dist = folder / "python/tinyllm/dist"
    dist.mkdir(parents=True)
    (dist / "__init__.py").touch()
    (dist.parent / "__init__.py").touch()
    (dist / "comm.py").write_text(comm)
    return folder


def ol(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ol.cli", *command],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "python"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_the_catalogue_is_the_chapters() -> None:
    module = catalogue.module("L11.2")
    chapter = (ROOT / "course/chapters/L11.2.md").read_text()
    assert [test.name for test in module.tests] == re.findall(r"^\| `(test_\w+)` \|", chapter, re.M)
    assert module.course_tests.is_file()
    assert (ROOT / module.file).is_file()


def test_tests_prints_every_test_in_80_columns(capsys) -> None:
    assert main(["tests", "L11.2"]) == 0
    out = capsys.readouterr().out
    for test in catalogue.module("L11.2").tests:
        assert test.name in out
    assert max(map(len, out.splitlines())) <= 80


def test_an_unknown_module_is_a_usage_error(capsys) -> None:
    assert main(["tests", "L99"]) == 2
    assert "no module 'L99' in this course; it has L11.2" in capsys.readouterr().err


def test_check_passes_a_finished_file_from_a_folder_below(tmp_path: Path) -> None:
    folder = learner(tmp_path, PLAIN.read_text())
    run = ol(folder / "python/tinyllm", "check", "L11.2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "L11.2 course tests: 10 of 10 pass" in run.stdout


def test_check_shows_the_first_failure(tmp_path: Path) -> None:
    run = ol(learner(tmp_path, STUB), "check", "L11.2")
    assert run.returncode == 1
    assert "FAIL  test_chunk_bounds" in run.stdout
    assert "called   chunk_bounds(3, 3)" in run.stdout
    assert "expected [(0, 1), (1, 2), (2, 3)]" in run.stdout
    assert "0 of 10 pass" in run.stdout


def test_check_says_why_a_file_does_not_import(tmp_path: Path) -> None:
    run = ol(learner(tmp_path, "import nowhere_to_be_found\n"), "check", "L11.2")
    assert run.returncode == 1
    assert "No module named 'nowhere_to_be_found'" in run.stdout


def test_check_without_a_file(tmp_path: Path) -> None:
    run = ol(tmp_path, "check", "L11.2")
    assert run.returncode == 2
    assert "no python/tinyllm/dist/comm.py here" in run.stderr


def test_another_file_is_never_judged_in_its_place(tmp_path: Path) -> None:
    folder = learner(tmp_path, PLAIN.read_text())
    shutil.move(folder / "python/tinyllm/dist/comm.py", folder / "python/tinyllm/dist/comm_.py")
    with pytest.raises(judge.WrongFileError, match="not "):
        judge.judge(catalogue.module("L11.2"), folder)


def test_ol_imports_no_tinyllm() -> None:
    for path in (ROOT / "python/ol").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("tinyllm") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("tinyllm")
