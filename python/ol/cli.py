"""The command line of the course: `ol tests MODULE`, `ol check MODULE`."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from pathlib import Path

from ol.catalogue import Module, UnknownModuleError, module
from ol.judge import Verdict, WrongFileError, find_repository, judge

PASSED, NOT_YET, USAGE, INTERNAL, INTERRUPTED = 0, 1, 2, 5, 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        code = int(options.run(module(options.module)))
        sys.stdout.flush()
        return code
    except UnknownModuleError as error:
        return _complain(str(error), USAGE)
    except WrongFileError as error:
        return _complain(str(error), INTERNAL)
    except BrokenPipeError:  # the reader, say head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_YET
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ol", description="Work on a module of the course.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, what in (
        ("tests", show_tests, "what the course tests of a module check, and why"),
        ("check", check, "run the course tests on your file"),
    ):
        command = commands.add_parser(name, help=what, description=what.capitalize() + ".")
        command.add_argument("module", metavar="MODULE", help="such as L11.2")
        command.set_defaults(run=run)
    return parser


def show_tests(module: Module) -> int:
    """Print the catalogue of a module's course tests."""
    print(f"{module.name}  {module.title}\nyou write {module.file}\n")
    for test in module.tests:
        print(f"{test.name}  [{test.kind}]")
        for label, text in (("checks ", test.checks), ("matters", test.why)):
            first = f"  {label}  "
            print(textwrap.fill(text, 78, initial_indent=first, subsequent_indent=" " * len(first)))
    return PASSED


def check(module: Module) -> int:
    """Judge the file in the current repository by the course tests."""
    repository = find_repository(module, Path.cwd())
    if repository is None:
        return _complain(f"no {module.file} here or in a folder above; start one there", USAGE)
    verdicts = judge(module, repository)
    for verdict in verdicts:
        print(f"{'pass' if verdict.passed else 'FAIL'}  {verdict.test}")
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        _explain(failed[0])
    print(f"\n{module.name} course tests: {len(verdicts) - len(failed)} of {len(verdicts)} pass")
    return NOT_YET if failed else PASSED


def _explain(verdict: Verdict) -> None:
    """One failure at a time: the first is often the cause of the next."""
    print(f"\n{verdict.test}\n{textwrap.indent(verdict.message.strip(), '  ')}")


def _complain(message: str, code: int) -> int:
    print(f"ol: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
