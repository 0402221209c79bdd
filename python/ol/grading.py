"""`ol check` and `ol mutate`: a file by the course tests, and tests by what they notice."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ol import mutants
from ol.catalogue import Module
from ol.desk import Desk, RedSuiteError, open_desk
from ol.grader import Baseline, Progress, Verdict
from ol.mutants import Mutant
from ol.runner import Result
from ol.workspace import NoRepositoryError, Workspace

RED = "your tests on a right solution"  # what is open where they fail there
SAMPLE = 20  # mutants that check tries; `mutate` tries all


@dataclass
class Grade:
    """What a check or a mutation grade found."""

    module: Module
    command: str
    own_tests: int = 0  # of the learner, that pass on the reference
    skipped: list[str] = field(default_factory=list)
    course: list[Result] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # right solutions that the tests pass on, too
    pitfalls: list[Verdict] = field(default_factory=list)
    mutants: list[Verdict] = field(default_factory=list)
    every: list[Mutant] = field(default_factory=list)  # the equivalent ones, too
    red: RedSuiteError | None = None  # why there is no score
    not_run: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # tests that were never the first to notice
    seconds: float = 0.0
    may_show: bool = False  # the learner's own code passes, so that code of ours may be shown

    @property
    def equivalent(self) -> int:
        """Mutants that no test can notice."""
        return sum(bool(mutant.equivalent) for mutant in self.every)

    @property
    def of(self) -> int:
        """Mutants that can be noticed."""
        return len(self.every) - self.equivalent

    @property
    def score(self) -> float:
        """Noticed mutants by all that could be."""
        return noticed(self.mutants) / len(self.mutants) if self.mutants else 0.0

    @property
    def failures(self) -> list[Result]:
        """The course tests that do not pass."""
        return [result for result in self.course if result.outcome != "passed"]

    @property
    def course_passed(self) -> bool:
        """Whether the learner's file passes all course tests."""
        return bool(self.course) and not self.failures

    @property
    def tests_passed(self) -> bool:
        """Whether the learner's tests are good enough."""
        all_pitfalls = bool(self.pitfalls) and noticed(self.pitfalls) == len(self.pitfalls)
        return all_pitfalls and self.score >= self.module.threshold

    @property
    def passed(self) -> bool:
        """Whether all that the command looks at is good enough."""
        return self.tests_passed and (self.course_passed or self.command == "mutate")

    @property
    def survivors(self) -> list[Verdict]:
        """What the tests did not notice, the pitfalls first."""
        return [verdict for verdict in (*self.pitfalls, *self.mutants) if not verdict.killed]

    def headline(self) -> dict[str, Any]:
        """The figures."""
        return {
            "passed": self.passed,
            "pitfalls": [noticed(self.pitfalls), len(self.pitfalls)],
            "mutants": [noticed(self.mutants), len(self.mutants)],
        }


def noticed(verdicts: list[Verdict]) -> int:
    """On how many a test failed or did not end."""
    return sum(verdict.killed for verdict in verdicts)


# -- check and mutate ------------------------------------------------------------------------------


def check(workspace: Workspace, progress: Progress) -> Grade:
    """Course tests on the file; own tests on right solutions, pitfalls and a sample of mutants."""
    if not workspace.file.is_file():
        start = f"`ol start {workspace.module.name}` writes a stub"
        raise NoRepositoryError(f"there are tests, but no {workspace.module.file}: {start}")
    grade = Grade(workspace.module, "check")
    before = workspace.fingerprint()
    with open_desk(workspace, progress) as desk:
        progress("course tests, and yours on the reference", 0, 0)
        course = desk.runner.submit(desk.course_tests)  # it takes one worker, and the other is free
        base = _baseline(desk, grade)
        grade.course = course.result()
        grade.may_show = grade.course_passed
        workspace.remember(course_passed=grade.course_passed and workspace.file_digest())
        if base:
            _judge_suite(desk, grade, base, SAMPLE)
    _remember(workspace, grade, course=[_function(result.test) for result in grade.failures])
    if grade.passed and workspace.fingerprint() == before:  # nobody has edited it meanwhile
        workspace.remember(passed=before)
    return grade


def mutate(workspace: Workspace, progress: Progress) -> Grade:
    """The learner's tests on right solutions, on the pitfalls and on every mutant."""
    grade = Grade(workspace.module, "mutate", not_run=["course tests (`ol check` runs them)"])
    known = workspace.state().get("course_passed")
    grade.may_show = workspace.is_the_clone or (known == workspace.file_digest() and bool(known))
    with open_desk(workspace, progress) as desk:
        progress("your tests on the reference", 0, 0)
        base = _baseline(desk, grade)
        if base:
            _judge_suite(desk, grade, base, None)
    _remember(workspace, grade)
    return grade


def _baseline(desk: Desk, grade: Grade) -> Baseline | None:
    """The learner's tests on all right solutions; None, and the reason noted, if one fails."""
    try:
        base = desk.own_baseline()
        grade.own_tests = len(base.passed)
        grade.skipped = [t for t, r in base.results.items() if r["outcome"] == "skipped"]
        trials = desk.try_other_solutions(base)
        grade.every = desk.mutants()  # while those run
        grade.others = desk.other_solutions(trials)
        return base
    except RedSuiteError as error:
        grade.red = error
        grade.not_run += ["pitfalls", "mutants"]
        return None


def _judge_suite(desk: Desk, grade: Grade, base: Baseline, sample: int | None) -> None:
    begun = time.monotonic()
    judged = [mutant for mutant in grade.every if not mutant.equivalent]
    if sample is not None:
        judged = mutants.sample(grade.every, sample)
    grade.pitfalls = desk.own.judge("pitfalls", desk.pitfalls(), base)
    grade.mutants = desk.own.judge("mutants", judged, base)
    first = {_function(verdict.test) for verdict in (*grade.pitfalls, *grade.mutants)}
    grade.idle = sorted({_function(test) for test in base.passed} - first)
    desk.own.forget_what_is_gone(base)
    grade.seconds = time.monotonic() - begun


def _function(test: str) -> str:
    """The function of a test, of all its parameters."""
    return test.partition("::")[2].partition("[")[0]


def _remember(workspace: Workspace, grade: Grade, **more: list[str]) -> None:
    """Keep the figures, and what is still open, for `ol`, `ol hint` and `ol diff`."""
    points = [verdict.subject.id for verdict in grade.pitfalls if not verdict.killed]
    points += [
        f"{subject.function or 'the module'}: {subject.sentence}"
        for subject in (verdict.subject for verdict in grade.mutants if not verdict.killed)
        if isinstance(subject, Mutant)
    ]
    if grade.red:
        points = [RED]
    known = {"passed": None} if grade.command == "check" else {}
    own = [] if grade.tests_passed else points
    workspace.remember(**known, own=own, **more, **{grade.command: grade.headline()})
