"""All that judging a workspace takes, laid out for one command and cleared away after it."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ol import catalogue, mutants, wheats
from ol.catalogue import Module
from ol.grader import Baseline, Grader, Progress
from ol.mutants import Mutant, Pitfall, Subject
from ol.runner import Result, Runner
from ol.stage import Stage, rooms
from ol.suite import Suite, digest
from ol.verdicts import Verdicts
from ol.workspace import Workspace


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
        return self.course.results(subject, Baseline.assumed(tests), library)

    def own_baseline(self) -> Baseline:
        """The learner's tests on the reference; RedSuiteError where they cannot judge anything."""
        where = self.workspace.module.own_tests
        if not self.workspace.own_tests.is_dir():
            raise RedSuiteError(f"there are no tests of yours: no folder {where}", [])
        base = self.own.baseline(self.reference)
        if base.failed:
            told = f"{len(base.failed)} of your {len(base.tests)} tests fail on the reference"
            raise RedSuiteError(f"{told}, which is right: they can judge nothing yet", base.failed)
        if not base.passed:
            what = "skips all its tests" if base.tests else "has no test in it"
            raise RedSuiteError(f"{where} {what}: there is nothing to grade", [])
        return base

    def on_other_solutions(self, base: Baseline) -> list[str]:
        """The other right solutions; RedSuiteError where a test fails on one of them."""
        found = wheats.wheats(self.workspace.module, self.reference.source)
        tried = self.runner.map(lambda subject: self.own.on_another(subject, base), found.values())
        for name, failures in zip(found, tried, strict=True):
            if failures:
                raise RedSuiteError(
                    f"{len(failures)} of your tests pass on the reference but fail on {name}:"
                    " they insist on something that the contract does not promise",
                    failures,
                )
        return list(found)

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
    package = module.inside.parts[0]
    third_party = {name for name in course.modules | own.modules if name.split(".")[0] != package}
    reference = catalogue.reference_package(module)
    same = rooms(reference, module.import_name)
    engine = _engine(module)
    with (
        tempfile.TemporaryDirectory(prefix="ol-") as name,
        Runner([*sorted({"numpy", "pytest", *third_party}), *same]) as runner,
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
    ours = [here / "worker.py", here / "inside/sitecustomize.py", here / "grader.py"]
    rooms = [path for path in package.rglob("*.py") if path != catalogue.reference(module)]
    texts = [path.read_text(encoding="utf-8") for path in (*ours, *sorted(rooms))]
    return digest("\0".join([platform.python_version(), *versions, *texts]))
