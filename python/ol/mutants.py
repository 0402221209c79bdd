"""The faults that a suite has to notice: the course's pitfalls, and mutants of the reference."""

from __future__ import annotations

import ast
import difflib
import hashlib
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ol import contract
from ol.catalogue import Module

if TYPE_CHECKING:
    from ol.generator import Mutation


class CourseError(Exception):
    """The course contradicts itself; `ol lint` lists all of it."""


@dataclass(frozen=True)
class Subject:
    """A version of the module to run tests on."""

    id: str
    source: str
    lines: frozenset[int] = frozenset()  # the changed statements, in the reference's numbers
    key: str = ""  # what it is, apart from the id; by default a digest of the source
    alone: bool = False  # needs nothing of the reference's package

    @property
    def digest(self) -> str:
        """Names the content."""
        return self.key or hashlib.sha256(self.source.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Pitfall(Subject):
    """One of the course's faults, s01 and so on."""

    old: str = ""  # what stands in the reference
    new: str = ""  # and what takes its place
    title: str = ""
    symptom: str = ""
    caught_by: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Mutant(Subject):
    """One small change of the reference."""

    function: str = ""  # where: "Comm.send", or "" at the module's top level
    diff: str = ""  # with three lines around it
    sentence: str = ""  # what it means that no test noticed
    equivalent: str = ""  # the reason why no test can notice, if so


def pitfalls(module: Module, source: str) -> list[Pitfall]:
    """The course's pitfalls, each put into the reference's source."""
    found = []
    for path in sorted(module.pitfalls.glob("s*.toml")):
        entry = tomllib.loads(path.read_text(encoding="utf-8"))
        old, new = entry["old"], entry["new"]
        if source.count(old) != 1:
            raise CourseError(
                f"{path.name}: its old text stands {source.count(old)} times in the"
                " reference; it has to stand there once"
            )
        first = source.count("\n", 0, source.index(old)) + 1
        changed = set(range(first, first + old.count("\n")))
        faulty = source.replace(old, new)
        found.append(Pitfall(path.stem, faulty, _statements(source, changed), **entry))
    return found


def mutants(module: Module, source: str) -> list[Mutant]:
    """Every mutant of the reference that a suite can be asked to notice, and the equivalent ones.

    Left out by rule: texts that only name a call in messages, the default of ``timeout``, what
    types alone see, and parameters that the contract does not have.  CourseError where the list
    of equivalent mutants names one that does not exist.
    """
    from ol import generator  # half a second of imports, which no other command needs

    known = _equivalents(module)
    extras = _extras(module, source)
    functions = _enclosing_functions(source)
    lines = source.splitlines(keepends=True)
    found: list[Mutant] = []
    for mutation in generator.mutations(source):
        if _is_excluded(mutation, extras):
            continue
        changed = mutation.source.splitlines(keepends=True)
        function = functions.get(mutation.line, "")
        where = (function, *_changed_line(lines, changed))
        found.append(
            Mutant(
                id=f"m{len(found) + 1:03}",
                source=mutation.source,
                lines=_statements(source, {mutation.line}),
                function=function,
                diff="".join(list(difflib.unified_diff(lines, changed))[2:]),
                sentence=_MEANING.get(mutation.kind, _NO_DIFFERENCE),
                equivalent=known.pop(where, ""),
            )
        )
    if known:
        told = "\n".join(f"  {function}: {old} -> {new}" for function, old, new in known)
        raise CourseError(f"{module.equivalents.name} lists mutants that there are not:\n{told}")
    return found


def sample(all_of_them: list[Mutant], count: int) -> list[Mutant]:
    """Some of the mutants, evenly spread over the file, always the same ones."""
    judged = [mutant for mutant in all_of_them if not mutant.equivalent]
    step = max(1, len(judged) // count)
    return judged[step // 2 :: step][:count]


def _equivalents(module: Module) -> dict[tuple[str, str, str], str]:
    entries = tomllib.loads(module.equivalents.read_text(encoding="utf-8")).get("equivalent", [])
    return {
        (entry["function"], old.strip(), new.strip()): entry["reason"]
        for entry in entries
        for old, new in [(entry["old"], new) for new in entry["new"]]
    }


def _changed_line(old: list[str], new: list[str]) -> tuple[str, str]:
    """The text before and after, without the indentation."""
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, i, j, k, m = next(code for code in opcodes if code[0] != "equal")
    return "".join(old[i:j]).strip(), "".join(new[k:m]).strip()


def _extras(module: Module, source: str) -> set[str]:
    """Parameters that the reference has beyond the contract."""
    promised = contract.parameters(module.contract.read_text(encoding="utf-8"))
    ours = contract.parameters(source)
    return {
        name for function in promised for name in ours.get(function, set()) - promised[function]
    }


def _is_excluded(mutation: Mutation, extras: set[str]) -> bool:
    text = mutation.touched[:1] in "\"'"
    return (
        (text and mutation.role == "argument")
        or mutation.touched in extras
        or (mutation.role == "default" and mutation.parameter in {"timeout", *extras})
        or "TypeVar(" in mutation.old
    )


def _enclosing_functions(source: str) -> dict[int, str]:
    """The function around each line of a source."""
    around: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                if isinstance(child, ast.FunctionDef):
                    lines = range(child.lineno, (child.end_lineno or 0) + 1)
                    around.update(dict.fromkeys(lines, inner))
            visit(child, inner)

    visit(ast.parse(source), "")
    return around


def _statements(source: str, changed: set[int]) -> frozenset[int]:
    """The lines of the innermost statements around ``changed``: of a block, its head alone."""
    found: set[int] = set()
    for line in changed:
        around = [span for span in _spans(source) if span[0] <= line <= span[1]]
        if around:
            first, last = min(around, key=lambda span: span[1] - span[0])
            found |= set(range(first, last + 1))
    return frozenset(found | changed)


@lru_cache(maxsize=2)
def _spans(source: str) -> list[tuple[int, int]]:
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno
            spans.append((node.lineno, max(node.lineno, end or 0)))
    return spans


_MEANING = {
    "Integer": "a number one larger makes no difference to your tests: none stands at that border",
    "Float": "another number makes no difference to your tests",
    "SimpleString": "another text makes no difference to your tests",
    "ComparisonTarget": "the opposite comparison, or its border, is tried by no test",
    "BinaryOperation": "another arithmetic gives what your tests expect: their data are too simple",
    "BooleanOperation": "`and` or `or` is the same to your tests: they try one side only",
    "UnaryOperation": "the opposite condition makes no difference to your tests",
    "IfExp": "one side of this choice is tried by no test that looks at the result",
    "Assign": "the value is never looked at: no test depends on it",
    "AnnAssign": "the value is never looked at: no test depends on it",
    "AugAssign": "adding up and replacing are the same to your tests: they call it once",
    "Name": "the opposite truth value makes no difference to your tests",
    "Call": "this argument could as well be missing: no test depends on it",
}

_NO_DIFFERENCE = "this change makes no difference to your tests"
