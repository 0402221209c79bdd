"""The command line of the course: hands a module out, and judges what a learner makes of it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from ol import catalogue
from ol.catalogue import UnknownModuleError

PASSED, NOT_YET, USAGE, REFUSED, RED_SUITE, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

try:
    from ol import grading, guide, lint, report, workspace
    from ol.mutants import CourseError
    from ol.runner import RunnerError, WrongFileError
    from ol.workspace import NoRepositoryError, RefusedError
except ModuleNotFoundError as missing:  # an installation without the extra
    print(
        f"ol: {missing.name} is not installed: pip install 'tinyllm-dist[course]'", file=sys.stderr
    )
    sys.exit(INTERNAL)

Options = argparse.Namespace


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    if argv is None:  # as a program: SIGTERM, too, ends it in good order
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, say head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_YET
    except (UnknownModuleError, NoRepositoryError) as error:
        return _complain(options, str(error), USAGE)
    except RefusedError as error:
        return _complain(options, str(error), REFUSED)
    except WrongFileError as error:
        name = catalogue.module(options.module).import_name
        told = f"import {name} finds another file than the judged one: {error}"
        advice = "does a test change sys.path, or is an __init__.py missing beside your file?"
        return _complain(options, f"{told}; {advice}", INTERNAL)
    except (CourseError, RunnerError, OSError) as error:
        return _complain(options, str(error), INTERNAL)
    except Exception as error:
        traceback.print_exc()
        return _complain(options, f"a fault of ours: {type(error).__name__}: {error}", INTERNAL)
    except KeyboardInterrupt:
        told = "interrupted; what was judged so far is kept, and the next run goes on from there"
        return _complain(options, told, INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ol", description="Work on a module of the course.")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.set_defaults(run=show_status, command="status", module=None)
    subparsers = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, run: Callable[[Options], int], what: str) -> argparse.ArgumentParser:
        command = subparsers.add_parser(name, help=what, description=what.capitalize() + ".")
        command.add_argument("module", metavar="MODULE", help="such as L11.2")
        json = "one JSON document instead of text"
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=json)
        command.set_defaults(run=run, command=name)
        return command

    start = add("start", hand_out, "write a stub and an example test to begin with")
    start.add_argument("--into", metavar="DIR", type=Path, default=Path(), help="instead of here")
    start.add_argument("--force", action="store_true", help="write anew; your files are kept, too")
    add("tests", show_tests, "what the course tests of a module check, and why")
    for name, grade, what in (
        ("check", grading.check, "run the course tests on your file, and grade your own tests"),
        ("mutate", grading.mutate, "grade your tests on every mutant of the reference"),
    ):
        command = add(name, judge, what)
        command.add_argument("--all", action="store_true", help="show every survivor")
        command.add_argument(
            "--show", metavar="ID", help="show one pitfall or mutant, such as m042"
        )
        command.set_defaults(grade=grade)
    add("diff", show_diff, "after check has passed: the reference beside your code")
    add("hint", show_hint, "help with the first open point; each call goes one step further")
    add("lint", show_findings, "check the course itself: pitfalls, mutants, stub, solutions")
    return parser


def hand_out(options: Options) -> int:
    """`ol start`."""
    module = catalogue.module(options.module)
    done = workspace.start(module, options.into.resolve(), options.force)
    if options.json:
        report.print_json("start", PASSED, module=module.name, files=done)
        return PASSED
    print("\n".join(done))
    print(f"\nthe chapter: {module.chapter}")
    print(
        f"next: read `ol tests {module.name}`, write {module.file.name}, add tests of your own in"
    )
    print(f"{module.own_tests}, and run `ol check {module.name}`")
    return PASSED


def show_tests(options: Options) -> int:
    """`ol tests`."""
    module = catalogue.module(options.module)
    if options.json:
        report.print_json(
            "tests", PASSED, module=module.name, tests=[vars(t) for t in module.tests]
        )
    else:
        report.catalogue(module)
    return PASSED


def judge(options: Options) -> int:
    """`ol check` and `ol mutate`."""
    with report.progress_bar(options.json) as progress:
        found = options.grade(_workspace(options), progress)
    code = RED_SUITE if found.red else PASSED if found.passed else NOT_YET
    if options.json:
        report.print_json(found.command, code, **report.grade_as_json(found))
    else:
        report.grade(found, options.all, options.show)
    return code


def show_diff(options: Options) -> int:
    """`ol diff`."""
    found = guide.diff(_workspace(options))
    if options.json:
        report.print_json("diff", PASSED, functions=[vars(d) for d in found])
    else:
        report.differences(found)
    return PASSED


def show_hint(options: Options) -> int:
    """`ol hint`."""
    found = guide.hint(_workspace(options))
    if options.json:
        report.print_json("hint", PASSED, **vars(found))
    else:
        report.hint(found)
    return PASSED


def show_findings(options: Options) -> int:
    """`ol lint`."""
    with report.progress_bar(options.json) as progress:
        found = lint.lint(catalogue.module(options.module), progress)
    code = INTERNAL if any(finding.fault for finding in found) else PASSED
    if options.json:
        report.print_json("lint", code, findings=[vars(finding) for finding in found])
    else:
        report.findings(found)
    return code


def show_status(options: Options) -> int:
    """`ol` alone: where the learner is, and what comes next."""
    modules = [catalogue.module(name) for name in catalogue.names()]
    found = [guide.status(module, Path.cwd()) for module in modules]
    if options.json:
        report.print_json("status", PASSED, modules=[vars(status) for status in found])
    else:
        report.statuses(found)
    return PASSED


def _workspace(options: Options) -> workspace.Workspace:
    return workspace.find(catalogue.module(options.module), Path.cwd())


def _complain(options: Options, message: str, code: int) -> int:
    if options.json:
        report.print_json(options.command, code, error=message)
    else:
        print(f"ol: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
