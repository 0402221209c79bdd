"""Whether the course holds what it says: each finding is a sentence, and there should be none."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ol import catalogue, contract, mutants, wheats
from ol.catalogue import Module
from ol.desk import Desk, open_desk
from ol.grader import Baseline, Progress
from ol.mutants import CourseError, Pitfall, Subject
from ol.workspace import Workspace

LINES = 3  # that a pitfall may change


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``fault`` is empty where it is as it should be."""

    what: str
    fault: str


def lint(module: Module, progress: Progress) -> list[Finding]:
    """Look at pitfalls, mutants, stub, reference and other solutions; run what can be run."""
    source = catalogue.reference(module).read_text(encoding="utf-8")
    try:
        faults = mutants.pitfalls(module, source)
        every = mutants.mutants(module, source)
    except CourseError as error:
        return [Finding("the course's data", str(error))]
    found = list(_texts(module, faults))
    equivalent = sum(bool(mutant.equivalent) for mutant in every)
    found.append(Finding(f"{len(every)} mutants, of which {equivalent} equivalent, exist", ""))
    with (
        tempfile.TemporaryDirectory(prefix="ol-lint-") as folder,
        open_desk(Workspace(module, Path(folder)), progress) as desk,
    ):
        found += _runs(desk, module, source, faults, progress)
    return found


def _texts(module: Module, faults: list[Pitfall]) -> Iterator[Finding]:
    tests = {test.name for test in module.tests}
    for fault in faults:
        wrong = [f"no {name}" for name in ("title", "symptom", "hint") if not getattr(fault, name)]
        if fault.caught_by not in tests:
            wrong.append(f"{fault.caught_by} is no course test")
        if max(fault.old.count("\n"), fault.new.count("\n")) > LINES:
            wrong.append(f"changes more than {LINES} lines")
        if not _parses(fault.source):
            wrong.append("does not parse")
        yield Finding(f"{fault.id} applies once, parses, and has its texts", "; ".join(wrong))


def _runs(
    desk: Desk, module: Module, source: str, faults: list[Pitfall], progress: Progress
) -> list[Finding]:
    file = module.course_tests.name
    every = [f"{file}::{test.name}" for test in module.tests]
    stub = contract.stub(module.contract.read_text(encoding="utf-8"), module.name)
    right = {"the reference": Subject("reference", source), **wheats.wheats(module, source)}
    jobs = [(f"{name} passes all course tests", s, every, True) for name, s in right.items()]
    jobs.append(
        ("the stub fails all course tests", Subject("stub", stub, alone=True), every, False)
    )
    for fault in faults:
        named = [f"{file}::{fault.caught_by}"]
        jobs.append((f"{fault.id} is caught by {fault.caught_by}", fault, named, False))
    done = 0

    def run(job: tuple[str, Subject, list[str], bool]) -> Finding:
        nonlocal done
        what, subject, tests, should_pass = job
        results = desk.course.results(subject, Baseline.assumed(tests))
        wrong = [r for r in results if (r.outcome == "passed") != should_pass]
        done += 1
        progress("course runs", done, len(jobs))
        told = "; ".join(f"{r.test.partition('::')[2]} {r.outcome} {r.message}" for r in wrong)
        return Finding(what, told)

    return desk.runner.map(run, jobs)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
