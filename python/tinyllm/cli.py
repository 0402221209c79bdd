"""The command line, ``tinyllm``: arguments and exit codes; what a command does stands elsewhere.

Exit codes: 0 all is well, 1 a check or a run failed, 2 the command cannot be carried out as given,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, "interrupted")
    except BrokenPipeError:  # the reader, say head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # say, no more processes, or a full disk
        return _complain(FAILED, error.strerror or str(error))


def _complain(code: int, message: str) -> int:
    start = "\n" if code != USAGE and sys.stderr.isatty() else ""  # after ^C, or a progress bar
    print(f"{start}tinyllm: {message}", file=sys.stderr)
    return code


# -- arguments -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tinyllm", description="Collectives over processes.")
    parser.add_argument("--version", action="version", version=f"tinyllm {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")
    _add_demo(commands.add_parser("demo", help="see it work, and measure it, on this machine"))
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.description = (
        "Follow the chapter's example message by message, count the bytes of a ring all-reduce,"
        " and train a small language model on several processes. Takes a quarter of a minute or so."
    )
    _number(demo, "--world", 8, "ranks of part 2")
    _number(demo, "--size", 80_000, "doubles on each rank in part 2", smallest=0)
    _number(demo, "--ranks", 4, "ranks of part 3", smallest=2)
    _number(demo, "--steps", 300, "training steps of part 3")
    demo.add_argument(
        "--text", metavar="FILE", help="train on it (default: Python's language reference)"
    )
    demo.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    demo.set_defaults(run=_demo)


def _number(
    command: argparse.ArgumentParser, name: str, default: int, what: str, smallest: int = 1
) -> None:
    command.add_argument(
        name,
        type=at_least(smallest),
        default=default,
        metavar="N",
        help=f"{what} (default: {default})",
    )


def at_least(limit: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``limit`` on."""

    def number(text: str) -> int:
        value = int(text) if text.removeprefix("-").isdecimal() else None
        if value is None or value < limit:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {limit}")
        return value

    return number


def _version() -> str:
    try:
        return version("tinyllm-dist")
    except PackageNotFoundError:
        return "(not installed)"


# -- commands --------------------------------------------------------------------------------------


def _demo(args: argparse.Namespace) -> int:
    from tinyllm import demo
    from tinyllm.demo.limits import DemoError
    from tinyllm.dist import CommError

    options = demo.Options(args.world, args.size, args.ranks, args.steps, args.text)
    try:
        if args.json:
            parts = list(demo.measured(options))
            print(demo.to_json(parts))
        else:
            parts = demo.shown(demo.measured(options))
    except DemoError as error:
        return _complain(USAGE, str(error))
    except CommError as error:
        return _complain(FAILED, str(error))
    return OK if demo.all_hold(parts) else FAILED
