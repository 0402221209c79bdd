"""The course judged by `ol lint`; and `ol lint` judged by courses with one thing wrong."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

from ol import catalogue
from ol.lint import Finding, lint

MODULE = catalogue.module("L11.2")
PITFALLS = sorted(MODULE.pitfalls.glob("s*.toml"))
TEN = re.findall(r"^def (test_\w+)", MODULE.course_tests.read_text(), re.M)
CHAPTER = MODULE.chapter.read_text()


def quiet(what: str, done: int, total: int) -> None:
    """No progress bar."""


def faults(module: catalogue.Module) -> list[Finding]:
    return [finding for finding in lint(module, quiet) if finding.fault]


def test_the_course_holds_what_it_says() -> None:
    found = lint(MODULE, quiet)
    assert [finding for finding in found if finding.fault] == []
    what = "\n".join(finding.what for finding in found)
    for path in PITFALLS:
        caught_by = tomllib.loads(path.read_text())["caught_by"]
        assert f"{path.stem} is caught by {caught_by}" in what
    for right in ("the reference", "another solution (plain_comm.py)", "with other names inside"):
        assert f"{right} passes all course tests" in what
    assert "the stub fails all course tests" in what


def test_the_ten_and_the_twelve_are_the_chapters() -> None:
    checks = re.findall(r"^\| `(test_\w+)` \|", CHAPTER, re.M)
    assert checks == TEN
    assert len(TEN) == 10
    rows = re.findall(r"^\| \d+ \| .* \| `(test_\w+)` \| (s\d\d) \|", CHAPTER, re.M)
    assert rows == [(tomllib.loads(p.read_text())["caught_by"], p.stem) for p in PITFALLS]
    assert len(rows) == 12


def spoiled(folder: Path, *changes: tuple[str, str]) -> catalogue.Module:
    """A course with one course test, and s07 once for each change, with that change in it."""
    good = (MODULE.pitfalls / "s07.toml").read_text()
    for number, (old, new) in enumerate(changes):
        assert old in good
        (folder / f"s{number}.toml").write_text(good.replace(old, new))
    chunk_bounds = tuple(test for test in MODULE.tests if test.name == "test_chunk_bounds")
    return dataclasses.replace(MODULE, pitfalls=folder, tests=chunk_bounds)


def test_lint_names_every_kind_of_fault_in_a_pitfall(tmp_path: Path) -> None:
    [hint] = re.findall(r'hint = ".*"', (MODULE.pitfalls / "s07.toml").read_text())
    wrong = {
        (hint, 'hint = ""'): "no hint",
        ("edges = [rank * size + max", "edges = [rank * size + max("): "does not parse",
        ("test_chunk_bounds", "test_something"): "test_something is no course test",
        ("max(0, rank + larger - world)", "min(rank, larger)"): "test_chunk_bounds passed",
        ("new = '''\n", "new = '''\n    a = 1\n    b = 2\n    c = 3\n"): "more than 3 lines",
    }
    found = faults(spoiled(tmp_path, *wrong))
    for number, fault in enumerate(wrong.values()):
        told = [f.fault for f in found if f.what.startswith(f"s{number} ")]
        assert any(fault in text for text in told), (number, fault, told)


def test_lint_names_a_pitfall_that_does_not_apply(tmp_path: Path) -> None:
    [finding] = faults(spoiled(tmp_path, ("    edges = [rank * size + min", "    sides = [min")))
    assert "s0.toml: its old text stands 0 times in the reference" in finding.fault
