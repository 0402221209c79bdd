"""The command line in this clone: the catalogue, exit codes, 80 columns, and who imports whom."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import ol
from ol import catalogue, report
from ol.cli import main
from ol.desk import RedSuiteError
from ol.grading import Grade
from ol.runner import Result

ROOT = Path(__file__).parents[3]
MODULE = catalogue.module("L11.2")


def test_the_catalogue_is_the_chapters() -> None:
    chapter = MODULE.chapter.read_text()
    assert [test.name for test in MODULE.tests] == re.findall(r"^\| `(test_\w+)` \|", chapter, re.M)
    for path in (MODULE.course_tests, MODULE.contract, MODULE.example, MODULE.equivalents):
        assert path.is_file()
    assert (ROOT / MODULE.file).samefile(catalogue.reference(MODULE))
    assert MODULE.import_name == "tinyllm.dist.comm"


def test_tests_prints_every_test_in_80_columns(capsys) -> None:
    assert main(["tests", "L11.2"]) == 0
    out = capsys.readouterr().out
    for test in MODULE.tests:
        assert test.name in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["tests", "L11.2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["version"] == 1
    assert [test["name"] for test in said["tests"]] == [test.name for test in MODULE.tests]


def test_an_unknown_module_is_a_usage_error(capsys) -> None:
    assert main(["tests", "L99"]) == 2
    assert "no module 'L99' in this course; it has L11.2" in capsys.readouterr().err
    assert main(["tests", "L99", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].startswith("no module 'L99'")


def test_an_unknown_command_is_a_usage_error(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["grade", "L11.2"])
    assert exit_.value.code == 2
    assert "invalid choice: 'grade'" in capsys.readouterr().err


def test_in_the_clone_start_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT / "course")
    assert main(["start", "L11.2", "--into", str(ROOT)]) == 3
    assert "--into DIR" in capsys.readouterr().err


def test_where_a_process_hangs_is_said_in_words() -> None:
    told = {"pid": 7, "process": "rank 1", "rank": 1, "at": ["comm.py", 42, "recv"]}
    assert report.where(told) == "rank 1 is in recv, comm.py:42"
    main_process = told | {"process": "MainProcess", "rank": None}
    assert report.where(main_process) == "the process of the tests is in recv, comm.py:42"
    silent = {"pid": 7, "state": "stopped"}
    assert "process 7 did not answer; the system says it is stopped" in report.where(silent)


def test_names_of_tests_are_no_markup(capsys) -> None:
    odd = "test_x.py::test_a[/x-[bold]]"
    failure = Result(odd, "failed", message="[/red] no [markup]")
    red = RedSuiteError("2 tests fail", [failure, failure])
    report.grade(Grade(MODULE, "mutate", red=red), False, None)
    said = capsys.readouterr().out
    assert said.count("test_a[/x-[bold]]") == 2
    assert "[/red] no [markup]" in said


def test_ol_imports_no_tinyllm() -> None:
    for path in (ROOT / "python/ol").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("tinyllm") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("tinyllm")


def test_modules_import_only_from_below() -> None:
    rows = re.findall(r"^    ([a-z]+(?:, [a-z]+)*)  +\S", str(ol.__doc__), re.M)
    layer = {name: n for n, row in enumerate(rows) for name in row.split(", ")}
    files = {path.stem: path for path in (ROOT / "python/ol").glob("*.py")}
    assert layer.keys() == files.keys() - {"__init__"}
    for name, path in files.items():
        code = ast.parse(path.read_text())
        used = {n.module for n in ast.walk(code) if isinstance(n, ast.ImportFrom)}
        used |= {
            f"ol.{alias.name}"
            for node in ast.walk(code)
            if isinstance(node, ast.ImportFrom) and node.module == "ol"
            for alias in node.names
        }
        for other in (str(m).removeprefix("ol.") for m in used if str(m).startswith("ol.")):
            assert layer[other] > layer[name], f"{name} imports {other}"


def test_only_the_adapter_knows_mutmut() -> None:
    for path in (ROOT / "python/ol").rglob("*.py"):
        code = ast.unparse(ast.parse(path.read_text()))
        assert ("import mutmut" in code or "from mutmut" in code) == (path.name == "generator.py")
