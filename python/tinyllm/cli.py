"""The command line, ``tinyllm``: arguments and exit codes; what a command does stands elsewhere.

Exit codes: 0 all is well, 1 a check or a run failed, 2 the command cannot be carried out as given,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
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
    _add_bench(commands.add_parser("bench", help="what the collectives take on this machine"))
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


def _add_bench(bench: argparse.ArgumentParser) -> None:
    from tinyllm.bench import ALGORITHMS, COLLECTIVES, DTYPES, meshes

    bench.description = (
        "Time collectives as nccl-tests does. What is timed is one call: its input is written anew"
        " and a barrier passed before it, its whole result compared after it, both outside the"
        " timer. The time of a call is that of its slowest rank; p50 and p99 are taken over as many"
        " calls as fit into --seconds. Out-of-place writes into another array (out=), in-place into"
        " the input's memory. Exit code 1 if an entry of a result is wrong."
    )
    _choices(bench, "--collective", [*COLLECTIVES, "all"], ["all_reduce"])
    _choices(bench, "--mesh", list(meshes()), list(meshes()))
    _choices(bench, "--algorithm", [*ALGORITHMS, "all"], ["ring"], "of all_reduce: ")
    bench.add_argument(
        "--world",
        type=at_least(2),
        nargs="+",
        default=[2, 4],
        metavar="N",
        help="ranks (default: 2 4)",
    )
    bench.add_argument(
        "--sizes",
        type=_sizes,
        nargs="+",
        default=[(8, 32 << 20)],
        metavar="SIZE",
        help="bytes, as 64K or 8:32M, of the whole array, all ranks' parts together"
        " (default: 8:32M)",
    )
    _number(bench, "--factor", 8, "a range goes in steps of this factor", smallest=2)
    bench.add_argument(
        "--op", choices=("sum", "mean"), default="sum", help="of all_reduce (default: sum)"
    )
    bench.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float64",
        metavar="TYPE",
        help=f"{', '.join(DTYPES)} (default: float64)",
    )
    bench.add_argument(
        "--seconds",
        type=_seconds,
        default=0.2,
        metavar="S",
        help="time for the calls of each row, untimed parts included (default: 0.2)",
    )
    bench.add_argument("--plot", metavar="FILE", help="draw it, as a .png, .svg or .pdf")
    bench.add_argument("--json", action="store_true", help="print all figures as one JSON object")
    bench.set_defaults(run=_bench)


def _choices(
    command: argparse.ArgumentParser,
    name: str,
    choices: list[str],
    default: list[str],
    what: str = "",
) -> None:
    command.add_argument(
        name,
        choices=choices,
        nargs="+",
        default=default,
        metavar="NAME",
        help=f"{what}{', '.join(choices)} (default: {' '.join(default)})",
    )


def _sizes(text: str) -> tuple[int, int]:
    from tinyllm.bench import sizes

    try:
        return sizes.bounds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds above 0")
    return value


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


def _bench(args: argparse.Namespace) -> int:
    from tinyllm import bench
    from tinyllm.bench import machine, sizes
    from tinyllm.dist import CommError

    options = bench.Options(
        collectives=_all(args.collective, bench.COLLECTIVES),
        meshes=_all(args.mesh, bench.meshes()),
        algorithms=_all(args.algorithm, bench.ALGORITHMS),
        worlds=sorted(set(args.world)),
        sizes=sizes.merged(args.sizes, args.factor),
        op=args.op,
        dtype=args.dtype,
        seconds=args.seconds,
    )
    where = machine.here()
    try:
        if args.plot:
            bench.check_plot(args.plot, options)
        if args.json:
            tables = list(bench.measured(options))
            print(bench.to_json(where, options, tables))
        else:
            tables = bench.shown(where, options, bench.measured(options))
        if args.plot:
            bench.plotted(args.plot, where, tables)
    except bench.BenchError as error:
        return _complain(USAGE, str(error))
    except CommError as error:
        return _complain(FAILED, str(error))
    return OK if bench.all_right(tables) else FAILED


def _all(named: Sequence[str], known: Iterable[str]) -> list[str]:
    """Those that were named, each once, in the order in which they are known."""
    return [name for name in known if name in named or "all" in named]
