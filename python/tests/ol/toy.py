"""A small library and suite of their own, so that the grader is tried without the course."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ol.grader import Grader
from ol.mutants import Subject
from ol.runner import Runner
from ol.stage import Stage
from ol.suite import Suite
from ol.verdicts import Verdicts

CORE = '''
import multiprocessing
from toy.helper import ONE


def double(x):
    return 2 * x


def _rank(rank, pipe):
    pipe.send((rank, double(rank)))


def ranks(n):
    """What each of n new processes says of its own number doubled."""
    context = multiprocessing.get_context("spawn")
    said = []
    for rank in range(n):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, theirs))
        process.start()
        said.append(ours.recv())
        process.join()
    return said


def add_one(x):
    return x + ONE
'''

SUITE = """
from toy.core import add_one, double, ranks


def test_double():
    assert double(3) == 6


def test_ranks():
    assert ranks(2) == [(0, 0), (1, 2)]


def test_add_one():
    assert double(0) == 0
    assert add_one(1) == 2
"""


def changed(old: str, new: str, name: str = "wrong") -> Subject:
    """The library with one place changed."""
    assert CORE.count(old) == 1
    return Subject(name, CORE.replace(old, new))


@contextmanager
def grader(
    folder: Path, suite: str = SUITE, engine: str = "1", runner: Runner | None = None
) -> Iterator[Grader]:
    """A grader of ``suite``; what it finds is kept in ``folder`` for the next one."""
    package = folder / "package" / "toy"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("ONE = 1\n")
    (package / "core.py").write_text(CORE)
    tests = folder / "suite"
    tests.mkdir(exist_ok=True)
    (tests / "test_toy.py").write_text(suite)
    stage = Path(tempfile.mkdtemp(dir=folder, prefix="stage-"))
    module = Path("toy/core.py")
    with closing(runner or Runner(["pytest"], 1)) as ours:
        yield Grader(
            Suite(tests),
            "toy.core",
            module,
            Stage(stage, package, module),
            ours,
            Verdicts(folder / "verdicts.json", engine),
        )
