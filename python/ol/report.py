"""How results look: tables of 80 columns for people, one JSON document for machines."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.syntax import Syntax
from rich.text import Text

from ol.catalogue import Module
from ol.desk import RedSuiteError
from ol.grader import Progress, Verdict
from ol.grading import Grade, noticed
from ol.guide import Difference, Hint, Status
from ol.lint import Finding
from ol.mutants import Mutant, Pitfall
from ol.runner import Result

JSON_VERSION = 1
WIDTH = 80


def console() -> Console:
    """Standard output, 80 columns wide also where it is a pipe."""
    return Console(width=min(WIDTH, Console().width), highlight=False, soft_wrap=False)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress]:
    """A bar on standard error while something runs; nothing where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Bar(*columns, console=Console(stderr=True, width=WIDTH), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield show


def print_json(command: str, exit_code: int, **content: Any) -> None:
    """The one document that a command with --json prints."""
    head = {"version": JSON_VERSION, "command": command, "exit_code": exit_code}
    print(json.dumps(head | content, indent=1))


# -- check and mutate ------------------------------------------------------------------------------


def grade(found: Grade, show_all: bool, show: str | None) -> None:
    """A grade as people read it: the lines of the table, then one thing to do."""
    out = console()
    module = found.module
    out.print(f"[bold]{module.name}[/]  {escape(module.title)}\n")
    for label, value, good in _lines(found):
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[good]
        out.print(f"  {mark} {label:<34}{escape(value)}".replace("\n", f"\n{'':38}"))
    for what in found.not_run:
        out.print(f"  · {'not run:':<34}{escape(what)}")
    if found.idle and found.command == "mutate":
        out.print()
        _paragraph(out, f"Never the first to notice anything: {', '.join(found.idle)}.", "  ")
    out.print()
    if found.red:
        _red_suite(out, found.red)
        return
    if show:
        _one(out, found, show)
        return
    if found.failures:
        _course_failure(out, found.failures[0])
    survivors = found.survivors
    for verdict in survivors if show_all else survivors[: 0 if found.failures else 1]:
        _survivor(out, verdict, found)
    _next(out, found, len(survivors))


def _lines(found: Grade) -> Iterator[tuple[str, str, bool | None]]:
    if found.course:
        passed = len(found.course) - len(found.failures)
        total = len(found.course)
        yield "course tests on your file", f"{passed} of {total} pass", passed == total
    told = f"{found.own_tests} pass, also on {len(found.others)} other right solutions"
    yield (
        "your tests on the reference",
        "they cannot judge yet" if found.red else told,
        not found.red,
    )
    if found.skipped:
        yield "your tests that were skipped", str(len(found.skipped)), None
    if found.red:
        return
    killed, of = noticed(found.pitfalls), len(found.pitfalls)
    yield "pitfalls that your tests notice", f"{killed} of {of}", killed == of
    killed, of = noticed(found.mutants), len(found.mutants)
    told = f"{killed} of {of} = {found.score:.2f}, needs {found.module.threshold:.2f}"
    if of < found.of:
        told += f"\na sample; there are {found.of}"
    yield "mutants that your tests notice", told, found.score >= found.module.threshold
    hung = sum(v.status == "timeout" for v in (*found.pitfalls, *found.mutants))
    if hung:
        yield "  of these by not ending in time", f"{hung}, each tried again alone", None
    if found.command == "mutate":
        yield "  left out as equivalent", str(found.equivalent), None


def _course_failure(out: Console, failure: Result) -> None:
    """One failure at a time: the first is often the cause of the next."""
    out.print(f"[bold]{_name(failure.test)}[/] {_outcome(failure.outcome)}")
    _told(out, _message(failure.message, failure.stacks, failure.seconds))
    out.print()


def _survivor(out: Console, verdict: Verdict, found: Grade) -> None:
    subject = verdict.subject
    if isinstance(subject, Pitfall):
        _paragraph(out, f"[bold]{subject.id}[/]  a pitfall that your tests do not notice")
        _paragraph(out, f"One sees: {escape(subject.symptom)}.", "  ")
    elif isinstance(subject, Mutant):
        where = subject.function or "the top level of the module"
        _paragraph(out, f"[bold]{subject.id}[/]  a change in {where} that your tests do not notice")
        if verdict.reached:
            _paragraph(out, f"What it shows: {escape(subject.sentence)}.", "  ")
    reached = ", ".join(map(_name, verdict.reached))
    told = f"Run by {reached}." if reached else "None of your tests runs that line."
    _paragraph(out, told, "  ")
    if isinstance(subject, Mutant):
        if found.may_show:
            out.print(_diff(subject.diff))
        else:
            _paragraph(out, "Its code is shown once your file passes the course tests.", "  ")
    out.print()


def _one(out: Console, found: Grade, wanted: str) -> None:
    for verdict in (*found.pitfalls, *found.mutants):
        if verdict.subject.id == wanted:
            if not verdict.killed:
                return _survivor(out, verdict, found)
            subject = verdict.subject
            out.print(f"[bold]{subject.id}[/]  noticed by {_name(verdict.test)}")
            _told(out, _message(verdict.message, verdict.stacks, verdict.seconds))
            if found.may_show and isinstance(subject, Mutant):
                out.print(_diff(subject.diff))
            return None
    known = ", ".join(v.subject.id for v in found.pitfalls)
    tried = f"{found.mutants[0].subject.id} to {found.mutants[-1].subject.id}"
    some = "a sample from " if len(found.mutants) < found.of else ""
    _paragraph(out, f"{escape(wanted)} was not tried; tried were {known}, and {some}{tried}.")
    return None


def _next(out: Console, found: Grade, survivors: int) -> None:
    name = found.module.name
    if found.passed:
        out.print("[bold green]Passed.[/]", end=" ")
        if found.command == "check":
            out.print(f"`ol diff {name}` shows the reference beside your code.")
        else:
            out.print(f"`ol check {name}` looks at your code as well.")
    else:
        out.print("[bold]Not yet.[/]", end=" ")
        out.print(f"`ol hint {name}` helps with the first point, a step at a time.")
    if survivors > 1:
        out.print(f"{survivors} survived: `--all` shows them, `--show ID` one of them.")


def grade_as_json(found: Grade) -> dict[str, Any]:
    """A grade for machines; code of the reference only where it may be shown."""

    def verdict(v: Verdict) -> dict[str, Any]:
        subject = v.subject
        told: dict[str, Any] = {"id": subject.id, "status": v.status, "test": v.test}
        told |= {"reached_by": v.reached, "message": v.message}
        if isinstance(subject, Pitfall):
            told |= {"symptom": subject.symptom}
        if isinstance(subject, Mutant):
            told |= {"function": subject.function, "sentence": subject.sentence}
            told |= {"diff": subject.diff} if found.may_show else {}
        return told

    return {
        "module": found.module.name,
        "passed": found.passed,
        "error": str(found.red) if found.red else None,
        "failures": [_result(r) for r in found.red.failures] if found.red else [],
        "course_tests": [_result(r) for r in found.course],
        "own_tests": {"pass": found.own_tests, "skipped": found.skipped, "idle": found.idle},
        "right_solutions": found.others,
        "pitfalls": [verdict(v) for v in found.pitfalls],
        "mutants": {
            "of": found.of,
            "equivalent": found.equivalent,
            "tried": len(found.mutants),
            "score": found.score,
            "threshold": found.module.threshold,
            "verdicts": [verdict(v) for v in found.mutants],
        },
        "not_run": found.not_run,
        "seconds": round(found.seconds, 1),
    }


def _result(result: Result) -> dict[str, str]:
    return {
        "test": _short(result.test),
        "outcome": result.outcome,
        "message": result.message,
    }


def _red_suite(out: Console, error: RedSuiteError) -> None:
    """The tests fail where they have to pass: no score, but the first failure."""
    _paragraph(out, f"[bold red]{escape(str(error))}[/]")
    for failure in error.failures[:1]:
        out.print(f"\n[bold]{_name(failure.test)}[/] {_outcome(failure.outcome)}")
        _told(out, _message(failure.text or failure.message, failure.stacks, failure.seconds))
    for failure in error.failures[1:]:
        out.print(f"{_name(failure.test)} {_outcome(failure.outcome)}")


# -- the rest --------------------------------------------------------------------------------------


def catalogue(module: Module) -> None:
    """The course tests of a module."""
    print(
        f"{module.name}  {module.title}\nyou write {module.file}\nthe chapter: {module.chapter}\n"
    )
    for test in module.tests:
        print(f"{test.name}  [{test.kind}]")
        for label, text in (("checks ", test.checks), ("matters", test.why)):
            first = f"  {label}  "
            print(textwrap.fill(text, 78, initial_indent=first, subsequent_indent=" " * len(first)))


def differences(found: list[Difference]) -> None:
    """The learner's code beside the reference."""
    out = console()
    for difference in found:
        out.print(f"[bold]{difference.function}[/]" + ("" if difference.diff else "  the same"))
        if difference.diff:
            out.print(_diff(difference.diff))
            out.print()


def hint(found: Hint) -> None:
    """One step of help."""
    out = console()
    out.print(f"[bold]{escape(found.about)}[/]  hint {found.step} of {found.steps}")
    _paragraph(out, escape(found.text), "  ")
    if found.step < found.steps:
        out.print("Once more for the next one.")


def findings(found: list[Finding]) -> None:
    """What lint looked at."""
    out = console()
    for finding in found:
        mark = "[red]✗[/]" if finding.fault else "[green]✓[/]"
        _paragraph(out, f"{mark} {escape(finding.what)}")
        if finding.fault:
            _paragraph(out, escape(finding.fault), "    ")
    wrong = sum(bool(finding.fault) for finding in found)
    out.print(f"\n{len(found)} things looked at, {wrong} wrong")


def statuses(found: list[Status]) -> None:
    """Where the learner is."""
    out = console()
    for status in found:
        out.print(f"[bold]{status.module}[/]  {escape(status.title)}")
        for line in status.lines:
            out.print(f"  {escape(line)}")
        out.print(f"  next: {status.next}")


def _diff(text: str) -> Syntax:
    return Syntax(text.rstrip(), "diff", background_color="default", word_wrap=True)


def _paragraph(out: Console, text: str, indent: str = "") -> None:
    out.print(textwrap.fill(text, WIDTH - 2, initial_indent=indent, subsequent_indent=indent))


def _short(test: str) -> str:
    return test.partition("::")[2] or test


def _name(test: str) -> str:
    """A test's name, between rich's marks."""
    return escape(_short(test))


def _outcome(outcome: str) -> str:
    said = {"timeout": "did not end", "broken": "could not be imported", "skipped": "was skipped"}
    return said.get(outcome, outcome)


def _message(message: str, stacks: Sequence[dict[str, Any]], seconds: float) -> str:
    """What a failure says; of a hang, where every process stood."""
    if not stacks:
        return message.strip("\n")
    return "\n".join(f"after {seconds:.1f} s {where(told)}" for told in stacks)


def _told(out: Console, text: str) -> None:
    out.print(Padding(Text(text), (0, 0, 0, 2)))


def where(told: dict[str, Any]) -> str:
    """One process of a hang: "rank 1 is in Comm.recv, comm.py:42"."""
    rank, process = told.get("rank"), told.get("process", f"process {told['pid']}")
    who = f"rank {rank}" if rank is not None else process
    who = "the process of the tests" if who == "MainProcess" else who
    if "at" not in told:
        return f"{who} did not answer; the system says it is {told.get('state')}"
    file, line, function = told["at"]
    return f"{who} is in {function}, {file}:{line}"
