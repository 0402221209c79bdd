"""Judges a suite: first on right solutions, then on wrong ones, which it has to notice."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ol.mutants import Subject
from ol.runner import FORKSERVER, SPAWN, Job, Result, Run, Runner
from ol.stage import Stage
from ol.suite import Suite
from ol.verdicts import Verdicts

PATIENCE = 1.0  # seconds that every test has, at least
SLACK = 5.0  # times as long as on the reference
UNKNOWN = 30.0  # seconds for a test that has not been measured
LESS = 5.0  # seconds, once another one has not ended
LATE = "late"  # a verdict that is yet to be confirmed
KILLS = {"failed", "broken", "timeout"}
SAID = 2000  # characters of a failure that are kept

Progress = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True)
class Verdict:
    """How a suite did on one subject."""

    subject: Subject
    status: str  # killed, timeout (killed too: no end in sight), survived
    test: str = ""  # that noticed
    message: str = ""  # what it said
    stacks: tuple[dict[str, Any], ...] = ()  # of all processes, where it hung
    seconds: float = 0.0  # until it noticed, or was ended
    reached: tuple[str, ...] = ()  # tests that run the changed line

    @property
    def killed(self) -> bool:
        """Whether a test noticed."""
        return self.status != "survived"


@dataclass
class Baseline:
    """A suite on the reference: what it takes, and what it reaches."""

    tests: list[str]
    results: dict[str, dict[str, Any]]
    method: str = FORKSERVER  # how ranks are started for "spawn"
    limits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def assumed(cls, tests: list[str]) -> Baseline:
        """Tests that are known to pass on the reference."""
        return cls(tests, {test: {"outcome": "passed", "seconds": 0.0} for test in tests})

    @property
    def failed(self) -> list[Result]:
        """The tests that do not pass on the reference; first the files that cannot be imported."""
        found = [_result(t, r) for t, r in self.results.items() if r["outcome"] in KILLS]
        return sorted(found, key=lambda result: result.outcome != "broken")

    @property
    def passed(self) -> list[str]:
        """The tests that do."""
        return [test for test, result in self.results.items() if result["outcome"] == "passed"]

    def reaching(self, subject: Subject) -> list[str]:
        """The tests that run a line that is changed in the subject."""
        if not subject.lines:  # it is not known what is changed
            return self.passed
        return [test for test in self.passed if subject.lines & set(self.results[test]["lines"])]

    def affected(self, subject: Subject) -> list[str]:
        """The tests that can notice: those that reach a changed line, and all that come after one.

        Fixtures and caches keep what was computed for the first test that asked for it.
        """
        reached = self.reaching(subject)
        return self.passed[self.passed.index(reached[0]) :] if reached else []


class Grader:
    """One suite, and what runs it; asks each question of each test once."""

    def __init__(
        self,
        suite: Suite,
        module: str,
        inside: Path,
        stage: Stage,
        runner: Runner,
        verdicts: Verdicts,
        progress: Progress = lambda what, done, total: None,
        rooms: Sequence[str] = (),
    ) -> None:
        """``module`` is the import name of what is judged, ``inside`` its file below the path.

        ``rooms`` are the reference's other modules, which workers have loaded.
        """
        self._rooms = tuple(rooms)
        self._suite = suite
        self._module = module
        self._inside = inside
        self._stage = stage
        self._runner = runner
        self._verdicts = verdicts
        self._progress = progress
        self._staged: Path | None = None
        self._lock = threading.Lock()
        self._kills: Counter[str] = Counter()

    # -- right solutions -------------------------------------------------------------------------

    def baseline(self, reference: Subject) -> Baseline:
        """The suite on the reference, with the lines that each test reaches.

        Ranks come from a warm fork server where the suite passes that way, else as they would
        without the grader.
        """
        base = self._complete(reference, FORKSERVER)
        if base.failed:
            spawned = self._complete(
                Subject("spawn", reference.source, key=f"spawn-{reference.digest}"), SPAWN
            )
            base = base if spawned.failed else spawned
        setup = max((result["setup"] for result in base.results.values()), default=0.0)
        for test, result in base.results.items():
            base.limits[test] = max(PATIENCE, SLACK * (result["seconds"] + setup))
        return base

    def on_another(self, subject: Subject, base: Baseline) -> list[Result]:
        """The tests that pass on the reference and fail on another right solution."""
        return [r for r in self.results(subject, base) if r.outcome in KILLS]

    def out_of_order(self, reference: Subject, base: Baseline) -> list[Result]:
        """The tests that fail on the reference when the last comes first: they need another one."""
        backwards = Subject("backwards", reference.source, key=f"backwards-{reference.digest}")
        turned = replace(base, results=dict(reversed(base.results.items())))
        return [r for r in self.results(backwards, turned) if r.outcome in KILLS]

    def results(
        self,
        subject: Subject,
        base: Baseline,
        library: Path | None = None,
        limit: float = UNKNOWN,
    ) -> list[Result]:
        """Every test on a subject, none left out; on ``library`` where it is no version of ours.

        What has passed is known; what has failed is tried again.  Once a test has not ended in
        ``limit`` seconds, the others have less.
        """
        known = self._verdicts.known(subject.digest)
        found = {
            test: _result(test, known[self._suite.key(test)])
            for test in base.passed
            if known.get(self._suite.key(test), {}).get("outcome") == "passed"
        }
        while todo := [test for test in base.passed if test not in found]:
            limits = tuple((test, limit) for test in todo)
            run = self._run(subject, todo, limits=limits, method=base.method, library=library)
            told = {r.test: r for r in run.results if r.test in todo} or _blame(todo, run)
            for result in told.values():
                self._note(subject, result)
            found |= told
            if any(result.outcome == "timeout" for result in run.results):
                limit = min(limit, LESS)
        self._verdicts.save()
        return [found[test] for test in base.passed]

    # -- wrong solutions -------------------------------------------------------------------------

    def judge(self, what: str, subjects: Sequence[Subject], base: Baseline) -> list[Verdict]:
        """The verdict on each subject, in their order."""
        done = 0

        def one(subject: Subject) -> Verdict:
            nonlocal done
            verdict = self._judge(subject, base)
            with self._lock:
                done += 1
                self._progress(what, done, len(subjects))
            return verdict

        self._progress(what, 0, len(subjects))
        try:
            first = self._runner.map(one, subjects)
            found = [self._confirmed(v, base) if v.status == LATE else v for v in first]
        finally:
            self._verdicts.save()
        return found

    def forget_what_is_gone(self, base: Baseline) -> None:
        """Drop the results of tests that are no longer there."""
        self._verdicts.keep({self._suite.key(test) for test in base.tests})

    def _judge(self, subject: Subject, base: Baseline) -> Verdict:
        """Run the tests that can notice, until one does, or does not end in time."""
        reached, affected = base.reaching(subject), base.affected(subject)
        known = self._verdicts.known(subject.digest)
        for test in affected:
            if known.get(self._suite.key(test), {}).get("outcome") in KILLS:
                return self._killed(subject, test, known[self._suite.key(test)], reached)
        unknown = [test for test in affected if self._suite.key(test) not in known]
        todo = self._promising(subject, unknown, reached, base)
        if not todo:
            return Verdict(subject, "survived", reached=tuple(reached))
        limits = tuple((test, base.limits[test]) for test in todo)
        run = self._run(subject, todo, limits=limits, method=base.method, stop=True)
        for result in run.results:
            if result.outcome == "timeout" and result.test:
                return Verdict(subject, LATE, result.test)
            test = result.test if result.test in todo else todo[0]  # its file may not be importable
            self._verdicts.note(subject.digest, self._suite.key(test), _record(result))
            if result.outcome in KILLS:
                return self._killed(subject, test, _record(result), reached)
        return Verdict(subject, "survived", reached=tuple(reached))

    def _confirmed(self, late: Verdict, base: Baseline) -> Verdict:
        """A test that took too long gets twice the time, with the machine to itself."""
        while late.status == LATE:
            limits = ((late.test, 2 * base.limits[late.test]),)
            run = self._run(late.subject, [late.test], limits=limits, method=base.method)
            for result in run.results[-1:] or [Result(late.test, "passed")]:
                self._verdicts.note(
                    late.subject.digest, self._suite.key(late.test), _record(result)
                )
            late = self._judge(late.subject, base)  # what is known now decides, or the tests left
        return late

    def _killed(
        self, subject: Subject, test: str, record: dict[str, Any], reached: list[str]
    ) -> Verdict:
        with self._lock:
            self._kills[test] += 1
            self._verdicts.note_killer(subject.digest, test)
        status = "timeout" if record["outcome"] == "timeout" else "killed"
        stacks = tuple(record.get("stacks", ()))
        return Verdict(
            subject, status, test, record["message"], stacks, record["seconds"], tuple(reached)
        )

    def _promising(
        self, subject: Subject, tests: list[str], reached: list[str], base: Baseline
    ) -> list[str]:
        """What noticed this one last time first, then what notices most for its time."""
        last = self._verdicts.killer(subject.digest)

        def worth(test: str) -> float:
            seconds: float = base.results[test]["seconds"]
            return (1 + self._kills[test]) / (0.05 + seconds)

        return sorted(tests, key=lambda t: (t != last, t not in reached, -worth(t)))

    # -- runs ------------------------------------------------------------------------------------

    def _complete(self, reference: Subject, method: str) -> Baseline:
        """All tests on the reference, one run for all that have not been run."""
        tests = self._verdicts.collected(self._suite.digest)
        broken: dict[str, dict[str, Any]] = {}
        if tests is None:
            run = self._run(reference, [], method=method)
            tests = run.collected
            broken = {r.test: _record(r) | {"lines": []} for r in run.results}
            if not broken:
                self._verdicts.note_collected(self._suite.digest, tests)
        known = self._verdicts.known(reference.digest)
        found = {
            test: known[self._suite.key(test)]
            for test in tests
            if known.get(self._suite.key(test), {}).get("outcome") in {"passed", "skipped"}
        }
        while todo := [test for test in tests if test not in found and not broken]:
            run = self._run(reference, todo, trace=True, method=method)
            told = {r.test: r for r in run.results if r.test in todo} or _blame(todo, run)
            for test, result in told.items():
                lines = sorted({*run.lines.get("", ()), *run.lines.get(test, ())})
                found[test] = _record(result) | {"lines": lines}
                self._note(reference, result, lines=lines)
        self._verdicts.save()
        results = broken | {test: found[test] for test in tests if test in found}
        return Baseline(tests, results, method)

    def _run(
        self,
        subject: Subject,
        tests: Sequence[str],
        *,
        limits: tuple[tuple[str, float], ...] = (),
        method: str = FORKSERVER,
        stop: bool = False,
        trace: bool = False,
        library: Path | None = None,
    ) -> Run:
        with self._lock:
            if self._staged is None:
                self._staged = self._stage.tests(self._suite.digest, self._suite.folder)
        with self._library(subject, library) as place:
            scratch = self._stage.scratch()
            job = Job(
                library=place,
                judged=place / self._inside,
                module=self._module,
                tests=self._staged,
                scratch=scratch,
                chosen=tuple(tests),
                limits=limits,
                limit=UNKNOWN,
                stop=stop,
                trace=trace,
                rooms=() if library or subject.alone else self._rooms,
                method=method,
            )
            run = self._runner.run(job)
        shutil.rmtree(scratch, ignore_errors=True)
        return run

    def _library(self, subject: Subject, given: Path | None) -> AbstractContextManager[Path]:
        if given is not None:
            return nullcontext(given)
        if subject.alone:
            return nullcontext(self._stage.bare_library(subject.source))
        return self._stage.library(subject.source)

    def _note(self, subject: Subject, result: Result, **more: Any) -> None:
        self._verdicts.note(subject.digest, self._suite.key(result.test), _record(result) | more)


def _blame(todo: list[str], run: Run) -> dict[str, Result]:
    """No test ran: what the run told of its file, or that it told nothing, is the first's."""
    told = run.results[0] if run.results else Result("", "broken", message="it did not run")
    return {todo[0]: replace(told, test=todo[0])}


def _record(result: Result) -> dict[str, Any]:
    record: dict[str, Any] = {
        "outcome": result.outcome,
        "seconds": round(result.seconds, 4),
        "setup": round(result.setup, 4),
        "message": result.message[:SAID],
    }
    if result.text and result.outcome != "passed":
        record["text"] = result.text[-SAID:]
    if result.stacks:
        record["stacks"] = result.stacks
    return record


def _result(test: str, record: dict[str, Any]) -> Result:
    known = {k: v for k, v in record.items() if k != "lines"}
    return Result(test, **known | {"stacks": tuple(record.get("stacks", ()))})
