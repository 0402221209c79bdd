"""``tinyllm demo``: what the library promises, measured on this machine.

    1  worked_table   the chapter's example, read off the messages of a real run
    2  traffic        the bytes of a ring all-reduce, against two simpler ways
    3  training       a small language model, on one process and on several ranks

A part measures and returns a dataclass; ``report`` turns it into text.  No number that is printed
stands in the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from tinyllm.demo import corpus, limits, traffic, training, worked_table
from tinyllm.demo.limits import DemoError
from tinyllm.demo.traffic import Traffic
from tinyllm.demo.training import Training
from tinyllm.demo.worked_table import WorkedTable

Part = WorkedTable | Traffic | Training


@dataclass(frozen=True)
class Options:
    """What ``tinyllm demo`` was asked for; ``text`` is a path, None for the language reference."""

    world: int
    size: int
    ranks: int
    steps: int
    text: str | None


def measured(options: Options) -> Iterator[Part]:
    """One part after the other; DemoError before the first if one of them cannot be done."""
    limits.check_world("--world", options.world)
    limits.check_world("--ranks", options.ranks)
    limits.check_memory(options.world, options.size)
    if options.text is None:
        name, text = "Python's language reference", corpus.language_reference()
    else:
        name, text = options.text, corpus.read(options.text)

    yield worked_table.measure()
    yield traffic.measure(options.world, options.size)
    yield training.measure(text, name, options.ranks, training.Plan(options.steps))


def shown(parts: Iterable[Part]) -> list[Part]:
    """Write each part to stdout as soon as it is measured; then return them all."""
    try:
        from tinyllm import screen  # here, because the library does without rich
        from tinyllm.demo import report
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "rich":
            raise
        raise DemoError("tinyllm demo needs rich: pip install 'tinyllm-dist[cli]'") from None
    out, done = screen.console(), []
    for part in parts:
        report.show(out, part)
        done.append(part)
    report.show_outcome(out, done)
    return done


def all_hold(parts: Sequence[Part]) -> bool:
    """Whether every check of every part came out right."""
    return all(check.holds for part in parts for check in part.checks)


def to_json(parts: Sequence[Part]) -> str:
    """All figures as one JSON object; ``schema`` grows when the meaning of a key changes."""
    table, moved, trained = parts
    figures = {
        "schema": 1,
        "ok": all_hold(parts),
        "worked_table": asdict(table),
        "traffic": asdict(moved),
        "training": asdict(trained),
    }
    return json.dumps(figures)
