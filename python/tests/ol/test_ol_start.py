"""`ol start`: what is handed out, and that nobody's work is lost."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ol import catalogue, contract, workspace
from ol.workspace import NoRepositoryError, RefusedError, Workspace

ROOT = Path(__file__).parents[3]
MODULE = catalogue.module("L11.2")
CONTRACT = MODULE.contract.read_text()
COMM = MODULE.file


def test_the_stub_is_the_contract_with_bodies_that_say_what_is_missing() -> None:
    stub = contract.stub(CONTRACT, "L11.2")
    assert contract.functions(stub) == contract.functions(CONTRACT)
    assert contract.parameters(stub) == contract.parameters(CONTRACT)
    assert contract.first_sentences(stub) == contract.first_sentences(CONTRACT)
    assert ast.get_docstring(ast.parse(stub)) == ast.get_docstring(ast.parse(CONTRACT))
    there: dict = {}
    exec(compile(stub, "comm.py", "exec"), there)
    with pytest.raises(NotImplementedError, match=r"chunk_bounds is yours to write; `ol tests L"):
        there["chunk_bounds"](3, 2)
    with pytest.raises(NotImplementedError, match=r"Comm\.barrier is yours to write"):
        there["Comm"]().barrier()


def test_start_writes_packages_stub_and_example(tmp_path: Path) -> None:
    told = workspace.start(MODULE, tmp_path / "new", force=False)
    files = sorted(p.relative_to(tmp_path / "new") for p in tmp_path.rglob("*") if p.is_file())
    assert [str(f) for f in files] == [
        "python/tests/l11-2-comm/conftest.py",
        "python/tests/l11-2-comm/test_example.py",
        "python/tinyllm/__init__.py",
        "python/tinyllm/dist/__init__.py",
        "python/tinyllm/dist/comm.py",
    ]
    assert [line.split()[0] for line in told] == ["wrote"] * 5


def test_start_again_changes_nothing(tmp_path: Path) -> None:
    workspace.start(MODULE, tmp_path, force=False)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.py")}
    assert [line.split()[0] for line in workspace.start(MODULE, tmp_path, force=False)] == (
        ["kept"] * 5
    )
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.py")} == before


def test_start_refuses_to_overwrite_and_force_keeps_a_backup(tmp_path: Path) -> None:
    workspace.start(MODULE, tmp_path, force=False)
    (tmp_path / "python/tinyllm/__init__.py").write_text("MINE = 1\n")
    for number in (1, 2):
        (tmp_path / COMM).write_text(f"work = {number}\n")
        with pytest.raises(RefusedError, match=r"comm\.py: 1 lines that a new one has not"):
            workspace.start(MODULE, tmp_path, force=False)
        assert (tmp_path / COMM).read_text() == f"work = {number}\n"
        told = workspace.start(MODULE, tmp_path, force=True)
        assert f"backup   {COMM}.backup-{number}" in told
        assert (tmp_path / f"{COMM}.backup-{number}").read_text() == f"work = {number}\n"
        assert (tmp_path / COMM).read_text() == contract.stub(CONTRACT, "L11.2")
    assert (tmp_path / "python/tinyllm/__init__.py").read_text() == "MINE = 1\n"
    assert not list(tmp_path.glob(".ol-start-*"))


def test_start_in_the_clone_is_refused_and_names_the_way_out() -> None:
    before = (ROOT / COMM).read_bytes()
    with pytest.raises(RefusedError, match=r"is the reference; `ol start L11\.2 --into DIR`"):
        workspace.start(MODULE, ROOT, force=True)
    assert (ROOT / COMM).read_bytes() == before


def test_the_repository_is_found_from_below_by_file_or_tests(tmp_path: Path) -> None:
    with pytest.raises(NoRepositoryError, match=r"no python/tinyllm/dist/comm.py here"):
        workspace.find(MODULE, tmp_path)
    deep = tmp_path / "python/tests/l11-2-comm/deeper"
    deep.mkdir(parents=True)
    assert workspace.find(MODULE, deep).root == tmp_path
    assert not workspace.find(MODULE, deep).is_the_clone
    assert workspace.find(MODULE, ROOT / "course").is_the_clone


def test_state_is_derived_ignored_by_git_and_survives_damage(tmp_path: Path) -> None:
    here = Workspace(MODULE, tmp_path)
    assert here.state() == {}
    here.remember(open=["s01"])
    here.remember(passed="x")
    assert here.state() == {"open": ["s01"], "passed": "x"}
    assert (tmp_path / ".ol/.gitignore").read_text() == "*\n"
    (tmp_path / ".ol/L11.2/state.json").write_text('{"open": [')
    assert here.state() == {}
