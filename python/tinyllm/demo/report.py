"""The parts of the demo as text, for a terminal or a pipe, in 80 columns.

A part becomes a heading and *blocks*: sentences and tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinyllm import screen
from tinyllm.demo import Part
from tinyllm.demo.check import Check
from tinyllm.demo.model import BYTES
from tinyllm.demo.traffic import REPEATS, Traffic
from tinyllm.demo.training import Training, ranks
from tinyllm.demo.worked_table import Row, WorkedTable
from tinyllm.screen import Block

MARKS = 8  # rows of the loss table
UNIFORM = math.log2(BYTES)
BAR = 26  # characters of its longest bar


def show(out: Console, part: Part) -> None:
    """Write one part: heading, blocks, checks."""
    if isinstance(part, WorkedTable):
        heading, blocks = _worked_table(part)
    elif isinstance(part, Traffic):
        heading, blocks = _traffic(part)
    else:
        heading, blocks = _training(part)
    screen.show(out, heading, [*blocks, _checks(part.checks)])


def show_outcome(out: Console, parts: Sequence[Part]) -> None:
    """The last line: what all checks together say."""
    checks = [check for part in parts for check in part.checks]
    failed = sum(not check.holds for check in checks)
    if failed:
        out.print(Text(f"{failed} of {len(checks)} checks failed.", "bold red"))
    else:
        out.print(Text(f"All {len(checks)} checks passed.", "bold green"))


def _checks(checks: Sequence[Check]) -> Table:
    table = screen.table("", "")
    table.show_header = False
    table.columns[1].no_wrap = False
    for check in checks:
        mark = Text("PASS", "green") if check.holds else Text("FAIL", "bold red")
        table.add_row(mark, check.claim)
    return table


# -- part 1 ----------------------------------------------------------------------------------------


def _worked_table(part: WorkedTable) -> tuple[str, list[Block]]:
    world = range(len(part.inputs))
    table = screen.table(
        "\nstep", *(f"rank {r}\nsends" for r in world), *(f"rank {r}\nthen holds" for r in world)
    )
    for row in part.rows:
        sends = [f"c{move.sent_chunk}={_entries(move.sent)}" for move in row.moves]
        table.add_row(row.step, *sends, *(_holds(row, rank) for rank in world))
    outcome = "\n".join(
        f"rank {rank} ends with {_list(result)}, having sent {sent:,} bytes"
        for rank, (result, sent) in enumerate(zip(part.results, part.bytes_sent, strict=True))
    )
    return "1. The chapter's worked table, from messages that went over the pipes", [
        f"{len(world)} processes, called ranks, hold {', '.join(map(_list, part.inputs))}; each"
        " wants the sum. They stand in a ring, and in each step every rank sends one chunk (c0 is"
        " entry 0, and so on) to its right neighbour. RS, reduce-scatter: a rank adds its own part"
        " to what arrives. AG, all-gather: the finished chunks go round.",
        table,
        outcome,
    ]


def _holds(row: Row, rank: int) -> str:
    move, arrived = row.moves[rank], row.moves[rank - 1].sent
    if move.own is None:
        return f"gets c{move.held_chunk}={_entries(move.held)}"
    parts = f"{_entries(move.own)}+{_entries(arrived)}"
    return f"c{move.held_chunk}: {parts}={_entries(move.held)}"


def _entries(chunk: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in chunk)


def _list(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


# -- part 2 ----------------------------------------------------------------------------------------


def _traffic(part: Traffic) -> tuple[str, list[Block]]:
    heading = f"2. ring all-reduce: world={part.world}, vector={part.size:,} doubles"
    columns = "bytes sent\nby rank 0", "by another\nrank (mean)", "\ntime", "time,\nring = 1"
    table = screen.table("", *columns, numbers=True)
    for way in (part.ring, part.all_gather, part.gather):
        others = _count(fmean(way.sent[1:])) if part.world > 1 else "-"
        ratio = f"{way.seconds / part.ring.seconds:.1f}"
        table.add_row(way.name, f"{way.sent[0]:,}", others, _time(way.seconds), ratio)
    if part.bound == 0:
        return heading, [table, "There is nothing to send here; try --world 4 --size 1000."]
    return heading, [table, _bound(part), _gather(part)]


def _bound(part: Traffic) -> str:
    sent, p = part.ring.sent, part.world
    mean, least, most = fmean(sent), min(sent), max(sent)
    spread = f" on average, {least:,} to {most:,}" if least < most else ""
    return (
        f"On the ring a rank sends {_count(mean)} bytes{spread}: {mean / part.bound:.2f}x the bound"
        f" 2 · {p - 1}/{p} · V = {_count(part.bound)}, where V = {part.vector_bytes:,} bytes is one"
        " vector. No all-reduce can send less. All-gather, then sum sends"
        f" {fmean(part.all_gather.sent) / mean:.1f}x as much."
    )


def _gather(part: Traffic) -> str:
    received = sum(part.gather.sent[1:])
    return (
        f"Gathering to rank 0 moves {sum(part.gather.sent):,} bytes in all, the ring"
        f" {sum(part.ring.sent):,}. But rank 0 carries all of the former: it receives {received:,}"
        f" and sends {part.gather.sent[0]:,}. The times (slowest rank, median of"
        f" {REPEATS} calls) say less than the bytes: here all links share one machine."
    )


def _count(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


# -- part 3 ----------------------------------------------------------------------------------------


def _training(part: Training) -> tuple[str, list[Block]]:
    many = ranks(part.many.ranks)
    return f"3. Training a language model: one process against {many}", [
        f"A model of {part.parameters:,} parameters learns to guess the next byte of {part.text}"
        f" ({part.text_bytes:,} bytes). In each of {part.steps:,} steps it guesses {part.batch}"
        f" bytes; {many} share them, and one all-reduce averages the gradients.",
        _losses(part),
        f"On text that it has not seen, the model needs {part.many.held_out_bits:.2f} bits per"
        f" byte. Knowing only how frequent each byte is, one needs {part.unigram_bits:.2f};"
        f" knowing nothing, {UNIFORM:.2f}.",
        _speeds(part),
        _verdict(part),
    ]


def _losses(part: Training) -> Table:
    """Some steps of both curves; the bars are the picture."""
    table = screen.table("step", ranks(1), ranks(part.many.ranks), "difference", "", numbers=True)
    table.columns[-1].justify, table.columns[-1].style = "left", "cyan"
    table.title = "loss, in bits per byte"
    table.title_justify = "left"
    table.title_style = "dim"
    last = part.steps - 1
    longest = max(part.one.bits)
    for step in sorted({last * mark // (MARKS - 1) for mark in range(MARKS)}):
        one, many = part.one.bits[step], part.many.bits[step]
        bar = "█" * round(BAR * many / longest)
        table.add_row(f"{step + 1:,}", f"{one:.4f}", f"{many:.4f}", f"{abs(one - many):.1g}", bar)
    return table


def _speeds(part: Training) -> Table:
    table = screen.table("", ranks(1), ranks(part.many.ranks), numbers=True)
    runs = (part.one, part.many)
    table.add_row("bytes guessed per second", *(f"{run.bytes_per_second:,.0f}" for run in runs))
    table.add_row("time per step", *(_time(run.step_seconds) for run in runs))
    table.add_row("processor time, all ranks", *(_time(run.cpu_seconds_per_step) for run in runs))
    table.add_row("share of time in all-reduce", *(f"{run.all_reduce_share:.0%}" for run in runs))
    table.add_row("BLAS (matrix) threads per rank", *(str(run.blas_threads) for run in runs))
    return table


def _verdict(part: Training) -> str:
    many, cores = ranks(part.many.ranks), part.cores
    factor = part.many.bytes_per_second / part.one.bytes_per_second
    here = f"On this machine, with {cores} core{'s' if cores > 1 else ''}"
    cost = (
        f"{part.many.all_reduce_share:.0%} of their time goes into the all-reduce, waiting for each"
        " other included"
    )
    if factor < 1:
        return (
            f"{here}, one process is {1 / factor:.2f} times as fast as {many}: they bring no cores"
            f" of their own, and {cost}."
        )
    return (
        f"{here}, {many} are {factor:.2f} times as fast as one process: BLAS threads share the"
        f" matrix products only, ranks everything but the update. Still, {cost}."
    )
