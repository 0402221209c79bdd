"""What becomes a mutant: mutmut's generator behind its adapter, the rules, the equivalent ones."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from mutmut.mutation.file_mutation import create_mutations, deep_replace

from ol import catalogue, generator, mutants, wheats
from ol.mutants import CourseError

ROOT = Path(__file__).parents[3]
MODULE = catalogue.module("L11.2")
SOURCE = catalogue.reference(MODULE).read_text()

SMALL = '''
from typing import TypeVar
T = TypeVar("T")


def f(x, /, op="sum", *, out=None, timeout=60.0):
    """f's doc."""
    if (x is not None) and op == "mean":
        x += g(-(x + 1), name="label", out=out) // 2
    return x if op else [y for y in x]
'''


@pytest.mark.parametrize("source", [SMALL, SOURCE[: SOURCE.index("# -- collectives")]])
def test_the_quick_way_equals_mutmuts_own(source: str) -> None:
    made = [mutation.source for mutation in generator.mutations(source)]
    module, found, _, _ = create_mutations("source.py", source)
    slow = [deep_replace(module, m.original_node, m.mutated_node) for m in found]
    assert sorted(made) == sorted(tree.code for tree in slow)  # type: ignore[union-attr]
    assert len(made) > 20


def test_mutations_parse_and_know_their_place() -> None:
    for mutation in generator.mutations(SMALL):
        ast.parse(mutation.source)
        assert mutation.source != SMALL
        assert mutation.old in SMALL.splitlines()[mutation.line - 1] or "\n" in mutation.old
    defaults = {m.parameter for m in generator.mutations(SMALL) if m.role == "default"}
    assert defaults == {"op", "timeout"}


def test_the_generator_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    course = project["optional-dependencies"]["course"]
    [pinned] = [name for name in course if name.startswith("mutmut")]
    assert pinned == f"mutmut=={importlib.metadata.version('mutmut')}"


@pytest.fixture(scope="module")
def every() -> list[mutants.Mutant]:
    return mutants.mutants(MODULE, SOURCE)


def test_the_rules_leave_out_labels_default_timeouts_and_extras(every) -> None:
    changed = "\n".join(
        line for m in every for line in m.diff.splitlines() if re.match(r"\+(?!\+\+)", line)
    )
    assert "XXmeanXX" in changed, "op is no label"
    assert 'op: str = "XXsumXX"' in changed
    for left_out in ("XXsend", "XXreduce_scatterXX", "timeout: float | None = 61", "TypeVar(None"):
        assert left_out not in changed
    assert "arrays.delivered(result, None)" not in changed, "out= is not in the contract"


def test_mutants_are_in_order_numbered_and_within_their_statement(every) -> None:
    assert [m.id for m in every] == [f"m{n:03}" for n in range(1, len(every) + 1)]
    assert len({m.source for m in every}) == len(every)
    first = [min(m.lines) for m in every]
    assert first == sorted(first)
    exchange = next(m for m in every if m.function == "Comm._exchange")
    assert "@@" in exchange.diff
    assert exchange.sentence


def test_the_sample_is_fixed_spread_and_without_equivalents(every) -> None:
    chosen = mutants.sample(every, 24)
    assert chosen == mutants.sample(every, 24)
    assert len(chosen) == 24
    assert len({m.function for m in chosen}) >= 8
    assert not any(m.equivalent for m in chosen)


def test_every_equivalent_has_a_reason_and_exists(every, tmp_path: Path) -> None:
    equivalents = [m for m in every if m.equivalent]
    assert equivalents
    assert all(len(m.equivalent) > 20 for m in equivalents)
    stale = tmp_path / "equivalents.toml"
    stale.write_text('[[equivalent]]\nfunction = "f"\nold = "a"\nnew = ["b"]\nreason = "none"\n')
    with pytest.raises(CourseError, match="mutants that there are not:\n  f: a -> b"):
        mutants.mutants(dataclasses.replace(MODULE, equivalents=stale), SOURCE)


def test_a_pitfall_that_no_longer_applies_is_named(tmp_path: Path) -> None:
    for text, count in (("return x", "0 times"), ("    def ", "16 times")):
        fault = f'old = "{text}!"\n' if count == "0 times" else f'old = "{text}"\n'
        (tmp_path / "s01.toml").write_text(fault + 'new = "pass"\n')
        with pytest.raises(CourseError, match=r"s01.toml: its old text stands \d+ times"):
            mutants.pitfalls(dataclasses.replace(MODULE, pitfalls=tmp_path), SOURCE)


def test_a_renamed_reference_keeps_its_interface_and_nothing_else() -> None:
    renamed = wheats.renamed(SOURCE)
    tree, before = ast.parse(renamed), ast.parse(SOURCE)

    def names(tree: ast.AST, kind: type) -> list[str]:
        return [node.name for node in ast.walk(tree) if isinstance(node, kind)]

    assert names(tree, ast.FunctionDef) == names(before, ast.FunctionDef)
    arguments = [a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)]
    assert arguments == [a.arg for a in ast.walk(before) if isinstance(a, ast.arg)]
    assert "send_chunk_" in renamed
    assert not re.search(r"\bsend_chunk\b", renamed.replace('"""', "'''").split("'''")[-1])
    assert "#" not in re.sub(r'""".*?"""', "", renamed, flags=re.S)
