"""All that judging a workspace takes, laid out for one command and cleared away after it."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ol import catalogue, mutants, wheats
from ol.catalogue import Module
from ol.grader import Baseline, Grader, Progress
from ol.mutants import Mutant, Pitfall, Subject
from ol.runner import SPAWN, Result, Runner
from ol.stage import Stage, rooms
from ol.suite import Suite, digest
from ol.verdicts import Verdicts
from ol.workspace import Workspace

COURSE_LIMIT = 10.0  # seconds for a course test; most take a tenth of one, one waits for six


BACKWARDS = "the reference, the last test first"
Trials = dict[str, "Future[list[Result]]"]


class RedSuiteError(Exception):
    """The learner's tests do not pass on a right solution, so that they can judge nothing."""

    def __init__(self, message: str, failures: list[Result]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass
class Desk:
    """The reference, a stage, and the graders of the two suites."""

    workspace: Workspace
    reference: Subject
    stage: Stage
    runner: Runner
    course: Grader
    own: Grader

    def course_tests(self) -> list[Result]:
        """The course tests on the learner's file."""
        module = self.workspace.module
        prefix = module.course_tests.name
        tests = [f"{prefix}::{test.name}" for test in module.tests]
        library = self.stage.learners_library(self.workspace.root / "python")
        subject = Subject("yours", "", key=self.workspace.package_digest())
        base = Baseline.assumed(tests)
        found = self.course.results(subject, base, library, COURSE_LIMIT)
        failed = [result.test for result in found if result.outcome != "passed"]
        if not failed:
            return found
        # The warm start is our doing, not the learner's: what fails is tried without it.
        base = replace(Baseline.assumed(failed), method=SPAWN)
        again = self.course.results(subject, base, library, COURSE_LIMIT)
        passed = {result.test: result for result in again if result.outcome == "passed"}
        return [passed.get(result.test, result) for result in found]

    def own_baseline(self) -> Baseline:
        """The learner's tests on the reference; RedSuiteError where they cannot judge anything."""
        where = self.workspace.module.own_tests
        if not self.workspace.own_tests.is_dir():
            raise RedSuiteError(f"there are no tests of yours: no folder {where}", [])
        base = self.own.baseline(self.reference)
        if base.failed:
            told = f"{len(base.failed)} of your {len(base.tests)} tests fail on the reference"
            if base.failed[0].outcome == "broken":
                told = f"a file of your tests cannot be used with the reference ({where})"
            raise RedSuiteError(f"{told}, which is right: they can judge nothing yet", base.failed)
        if not base.passed:
            what = "skips all its tests" if base.tests else "has no test in it"
            raise RedSuiteError(f"{where} {what}: there is nothing to grade", [])
        return base

    def try_other_solutions(self, base: Baseline) -> Trials:
        """Begin to run the learner's tests on other right solutions, and backwards."""
        submit, own = self.runner.submit, self.own
        trials: Trials = {BACKWARDS: submit(own.out_of_order, self.reference, base)}
        for name, subject in wheats.wheats(self.workspace.module, self.reference.source).items():
            trials[name] = submit(own.on_another, subject, base)
        return trials

    def other_solutions(self, trials: Trials) -> list[str]:
        """The other right solutions, once all is well; RedSuiteError where a test fails."""
        for name, trial in trials.items():
            failures = trial.result()
            if failures and name == BACKWARDS:
                raise RedSuiteError(
                    f"{len(failures)} of your tests pass on the reference only after others: each"
                    " test is run alone as well, and must not need what another one left",
                    failures,
                )
            if failures:
                raise RedSuiteError(
                    f"{len(failures)} of your tests pass on the reference but fail on {name}:"
                    " they insist on something that the contract does not promise",
                    failures,
                )
        return [name for name in trials if name != BACKWARDS]

    def pitfalls(self) -> list[Pitfall]:
        """The course's faults."""
        return mutants.pitfalls(self.workspace.module, self.reference.source)

    def mutants(self) -> list[Mutant]:
        """All mutants of the reference."""
        return mutants.mutants(self.workspace.module, self.reference.source)


@contextmanager
def open_desk(workspace: Workspace, progress: Progress) -> Iterator[Desk]:
    """A desk for one command."""
    module = workspace.module
    source = catalogue.reference(module).read_text(encoding="utf-8")
    course, own = Suite(module.course_tests.parent), Suite(workspace.own_tests)
    theirs = {path.name.removesuffix(".py") for path in workspace.own_tests.glob("*")}
    not_to_load = {module.inside.parts[0], *theirs}
    others = {n for n in course.modules | own.modules if n.split(".")[0] not in not_to_load}
    reference = catalogue.reference_package(module)
    same = rooms(reference, module.import_name)
    engine = _engine(module)
    with (
        tempfile.TemporaryDirectory(prefix="ol-") as name,
        closing(Runner([*sorted({"numpy", "pytest", *others}), *same])) as runner,
    ):
        stage = Stage(Path(name), reference, module.inside)

        def grader(suite: Suite, what: str) -> Grader:
            verdicts = Verdicts(workspace.state_folder() / f"{what}.json", engine)
            names = module.import_name, module.inside
            return Grader(suite, *names, stage, runner, verdicts, progress, same)

        yield Desk(
            workspace=workspace,
            reference=Subject("reference", source),
            stage=stage,
            runner=runner,
            course=grader(course, "course"),
            own=grader(own, "own"),
        )


def _engine(module: Module) -> str:
    """Names all that verdicts depend on besides subject and test."""
    versions = [importlib.metadata.version(name) for name in ("numpy", "pytest")]
    here, package = Path(__file__).parent, catalogue.reference_package(module)
    ours = [here / f"{name}.py" for name in ("worker", "runner", "stage", "grader")]
    ours.append(here / "inside/sitecustomize.py")
    rooms = [path for path in package.rglob("*.py") if path != catalogue.reference(module)]
    texts = [path.read_text(encoding="utf-8") for path in (*ours, *sorted(rooms))]
    return digest("\0".join([platform.python_version(), *versions, *texts]))
