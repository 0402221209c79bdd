"""The keys by which verdicts are kept: what an edit of a suite changes, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ol.suite import Suite
from ol.verdicts import Verdicts, write_atomically

FILE = """
import numpy, os.path
from tinyllm.dist.comm import spawn

def worker(comm):
    return 1

def test_a():
    assert worker(None) == 1

def test_b():
    assert 2

class TestC:
    def test_c(self):
        assert 3
"""
TESTS = ["test_x.py::test_a", "test_x.py::test_b[1-a::b]", "test_x.py::TestC::test_c"]


def keys(folder: Path, text: str, **more: str) -> list[str]:
    for name, content in {"test_x": text, **more}.items():
        (folder / f"{name}.py").write_text(content)
    suite = Suite(folder)
    return [suite.key(test) for test in TESTS]


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (("assert 2", "assert 22"), [False, True, False]),
        (("assert 3", "assert 33"), [False, False, True]),
        (("return 1", "return True"), [True, True, True]),
        (("import numpy", "import scipy"), [True, True, True]),
    ],
)
def test_an_edit_changes_the_keys_of_what_it_touches(tmp_path: Path, edit, changed) -> None:
    before = keys(tmp_path, FILE)
    after = keys(tmp_path, FILE.replace(*edit))
    assert [a != b for a, b in zip(before, after, strict=True)] == changed


def test_helpers_and_data_beside_the_tests_count_for_all(tmp_path: Path) -> None:
    before = keys(tmp_path, FILE)
    assert set(keys(tmp_path, FILE, conftest="A = 1")).isdisjoint(before)
    assert keys(tmp_path, FILE, conftest="A = 2") != keys(tmp_path, FILE, conftest="A = 1")


def test_a_test_that_others_call_counts_for_all(tmp_path: Path) -> None:
    calls = FILE + "\ndef test_d():\n    test_b()\n"
    before, after = keys(tmp_path, calls), keys(tmp_path, calls.replace("assert 2", "assert 22"))
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_a_new_test_leaves_the_others_alone(tmp_path: Path) -> None:
    assert keys(tmp_path, FILE)[0] == keys(tmp_path, FILE + "\n\ndef test_new():\n    pass\n")[0]


def test_what_tests_import_and_how_many_there_are(tmp_path: Path) -> None:
    keys(tmp_path, FILE)
    suite = Suite(tmp_path)
    assert suite.modules == {"numpy", "os.path", "tinyllm.dist.comm"}
    assert suite.count() == 3


def test_verdicts_come_back_and_another_engine_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    first = Verdicts(path, "1")
    first.note("mutant", "test", {"outcome": "failed"})
    first.note_killer("mutant", "test")
    first.note_collected("suite", ["a", "b"])
    first.save()
    again = Verdicts(path, "1")
    assert again.known("mutant") == {"test": {"outcome": "failed"}}
    assert (again.killer("mutant"), again.collected("suite")) == ("test", ["a", "b"])
    assert Verdicts(path, "2").known("mutant") == {}
    path.write_text(path.read_text()[:-9])
    assert Verdicts(path, "1").known("mutant") == {}


def test_results_of_tests_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "v.json", "1")
    for test in ("now", "old1", "old2"):
        verdicts.note("mutant", test, {"outcome": "passed"})
    verdicts.keep({"now"})
    assert list(json.loads((tmp_path / "v.json").read_text())["results"]["mutant"]) == ["now"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_test_that_comes_from_elsewhere_depends_on_all(tmp_path: Path) -> None:
    base = "class TestBase:\n    def test_x(self):\n        assert 1\n"
    (tmp_path / "test_y.py").write_text(base + "class TestMore(TestBase): ...\n")
    (tmp_path / "test_z.py").write_text("from test_y import *\n")
    tests = ["test_y.py::TestBase::test_x", "test_y.py::TestMore::test_x", "test_z.py::TestBase"]
    before = [Suite(tmp_path).key(test) for test in tests]
    (tmp_path / "test_y.py").write_text(base.replace("assert 1", "assert 2"))
    assert all(a != Suite(tmp_path).key(t) for a, t in zip(before, tests, strict=True))
