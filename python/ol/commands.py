"""What each command does, as data; report.py shows it, cli.py picks the command."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ol import catalogue, contract, mutants
from ol.catalogue import Module
from ol.desk import Desk, open_desk
from ol.grade import Progress, Verdict
from ol.mutants import Mutant
from ol.runner import Result
from ol.suite import Suite
from ol.workspace import NoRepositoryError, RefusedError, Workspace, find

SAMPLE = 24  # mutants that check tries; `mutate` tries all


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
    equivalent: int = 0
    of: int = 0  # mutants that there are, without the equivalent ones
    not_run: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)  # tests that were never the first to notice
    method: str = ""
    seconds: float = 0.0
    may_show: bool = False  # the learner's own code passes, so that code of ours may be shown

    @property
    def score(self) -> float:
        """Noticed mutants by all that could be."""
        return sum(v.killed for v in self.mutants) / len(self.mutants) if self.mutants else 0.0

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
        noticed = bool(self.pitfalls) and all(verdict.killed for verdict in self.pitfalls)
        return noticed and self.score >= self.module.threshold

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
            "pitfalls": [sum(v.killed for v in self.pitfalls), len(self.pitfalls)],
            "mutants": [sum(v.killed for v in self.mutants), len(self.mutants)],
        }


# -- check and mutate ------------------------------------------------------------------------------


def check(workspace: Workspace, progress: Progress) -> Grade:
    """Course tests on the file; own tests on right solutions, pitfalls and a sample of mutants."""
    grade = Grade(workspace.module, "check")
    with open_desk(workspace, progress) as desk:
        progress("course tests", 0, 0)
        grade.course = desk.course_tests()
        grade.may_show = grade.course_passed
        workspace.remember(course_passed=grade.course_passed and workspace.file_digest())
        workspace.remember(passed=None, open=[r.test.partition("::")[2] for r in grade.failures])
        _judge_suite(desk, grade, progress, SAMPLE)
    _remember(workspace, grade)
    return grade


def mutate(workspace: Workspace, progress: Progress) -> Grade:
    """The learner's tests on right solutions, on the pitfalls and on every mutant."""
    grade = Grade(workspace.module, "mutate", not_run=["course tests (`ol check` runs them)"])
    known = workspace.state().get("course_passed")
    grade.may_show = workspace.is_the_clone or (known == workspace.file_digest() and bool(known))
    with open_desk(workspace, progress) as desk:
        _judge_suite(desk, grade, progress, None)
    _remember(workspace, grade)
    return grade


def _remember(workspace: Workspace, grade: Grade) -> None:
    points = [result.test.partition("::")[2] for result in grade.failures]
    points += [verdict.subject.id for verdict in grade.pitfalls if not verdict.killed]
    points += [
        f"{verdict.subject.function or 'the module'}: {verdict.subject.sentence}"
        for verdict in grade.mutants
        if not verdict.killed and isinstance(verdict.subject, Mutant)
    ]
    known: dict[str, Any] = (
        {"open": points} if grade.tests_passed is False or grade.failures else {"open": []}
    )
    if grade.command == "check":
        known["passed"] = workspace.fingerprint() if grade.passed else None
    workspace.remember(**known, **{grade.command: grade.headline()})


def _judge_suite(desk: Desk, grade: Grade, progress: Progress, sample: int | None) -> None:
    begun = time.monotonic()
    progress("your tests on the reference", 0, 0)
    base = desk.own_baseline()
    grade.own_tests, grade.method = len(base.passed), base.method
    grade.skipped = [t for t, r in base.results.items() if r["outcome"] == "skipped"]
    progress("your tests on other right solutions", 0, 0)
    grade.others = desk.on_other_solutions(base)
    every = desk.mutants()
    judged = [mutant for mutant in every if not mutant.equivalent]
    grade.of, grade.equivalent = len(judged), len(every) - len(judged)
    if sample is not None:
        judged = mutants.sample(every, sample)
    grade.pitfalls = desk.own.judge("pitfalls", desk.pitfalls(), base)
    grade.mutants = desk.own.judge("mutants", judged, base)
    first = {_function(verdict.test) for verdict in (*grade.pitfalls, *grade.mutants)}
    grade.idle = sorted({_function(test) for test in base.passed} - first)
    desk.own.forget_what_is_gone(base)
    grade.seconds = time.monotonic() - begun


def _function(test: str) -> str:
    """The function of a test, of all its parameters."""
    return test.partition("::")[2].partition("[")[0]


# -- diff ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One function of the contract, the learner's and the reference's."""

    function: str
    diff: str  # from the learner's to the reference's; "" where they are the same


def diff(workspace: Workspace) -> list[Difference]:
    """The learner's code beside the reference, function by function of the contract.

    RefusedError until a check of the present content has passed.
    """
    passed = workspace.state().get("passed")
    if not workspace.is_the_clone and passed != workspace.fingerprint():
        now = "has passed, but not as it is now" if passed else "has not passed yet"
        raise RefusedError(
            f"{workspace.module.file} {now}: `ol check {workspace.module.name}` first, then the"
            " reference is shown beside it"
        )
    module = workspace.module
    mine = contract.bodies(workspace.file.read_text(encoding="utf-8"))
    ours = contract.bodies(catalogue.reference(module).read_text(encoding="utf-8"))
    found = []
    for name in contract.functions(module.contract.read_text(encoding="utf-8")):
        lines = mine.get(name, "").splitlines(), ours.get(name, "").splitlines()
        changes = difflib.unified_diff(
            *lines, f"your {name}", f"the reference's {name}", "", "", 99
        )
        found.append(Difference(name, "\n".join(line.rstrip("\n") for line in changes)))
    return found


# -- hint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hint:
    """One step of help with one thing."""

    about: str
    step: int
    steps: int
    text: str


def hint(workspace: Workspace) -> Hint:
    """The next step of help with what the last check found first; each call goes a step further.

    RefusedError where no check has found anything to help with.
    """
    module, state = workspace.module, workspace.state()
    open_points: list[str] = state.get("open", [])
    if not open_points:
        raise RefusedError(f"there is nothing to hint at: `ol check {module.name}` finds what is")
    about = open_points[0]
    texts = _hints(module, about)
    given = state.get("hints", {})
    step = min(given.get(about, 0) + 1, len(texts))
    workspace.remember(hints=given | {about: step})
    return Hint(about, step, len(texts), texts[step - 1])


def _hints(module: Module, about: str) -> list[str]:
    """From a nudge to nearly the answer; never code."""
    source = catalogue.reference(module).read_text(encoding="utf-8")
    faults = mutants.pitfalls(module, source)
    for test in module.tests:
        if test.name == about:
            known = [fault for fault in faults if fault.caught_by == about]
            return [
                f"The course test {about} checks {test.checks}. It matters: {test.why}.",
                *(
                    f"A known way to fail it: {fault.title}. Then: {fault.symptom}."
                    for fault in known
                ),
                *(fault.hint for fault in known),
            ]
    for fault in faults:
        if fault.id == about:
            return [
                f"Somebody's comm.py is wrong, and your tests pass. One sees: {fault.symptom}.",
                f"The fault is: {fault.title}.",
                fault.hint,
                f"The course test {fault.caught_by} notices it: `ol tests {module.name}`.",
            ]
    function, _, sentence = about.partition(": ")
    promise = contract.first_sentences(module.contract.read_text(encoding="utf-8")).get(function)
    return [
        f"Your tests pass on a reference in which one thing was changed, in {function}.",
        f"What it shows: {sentence}.",
        *([f"The contract says of {function}: {promise}"] if promise else []),
        "Let data differ per rank and per entry, try worlds 1 to 5, sizes that the world does not"
        " divide, and look at all that a call returns and counts.",
    ]


# -- status ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """Where a learner is with one module."""

    module: str
    title: str
    lines: list[str]
    next: str


def status(module: Module, start: Path) -> Status:
    """What there is of a module around ``start``, and what comes next."""
    try:
        workspace = find(module, start)
    except NoRepositoryError:
        return Status(module.name, module.title, ["not begun here"], f"ol start {module.name}")
    state = workspace.state()
    pyi = module.contract.read_text(encoding="utf-8")
    untouched = workspace.text() == contract.stub(pyi, module.name)
    tests = Suite(workspace.own_tests).count() if workspace.own_tests.is_dir() else 0
    what = "the stub" if untouched else "the reference" if workspace.is_the_clone else "begun"
    lines = [f"{module.file}: {what}", f"{module.own_tests}: {tests} tests"]
    for command in ("check", "mutate"):
        if command in state:
            known = state[command]
            (noticed, pitfalls), (killed, of) = known["pitfalls"], known["mutants"]
            passed = "passed" if known["passed"] else "not yet"
            lines.append(
                f"{command}: {passed}, pitfalls {noticed} of {pitfalls}, mutants {killed} of {of}"
            )
    if untouched:
        then = f"ol tests {module.name}, then write {module.file.name}"
    elif "check" not in state:
        then = f"ol check {module.name}"
    elif state.get("passed") != workspace.fingerprint():
        then = f"ol hint {module.name}" if state.get("open") else f"ol check {module.name}"
    else:
        then = f"ol diff {module.name}"
    return Status(module.name, module.title, lines, then)
