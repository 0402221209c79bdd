"""A folder of tests by content: what each test's verdicts depend on.

A test's key is a digest of its own text and of all in the folder that is no test: helpers, workers,
fixtures.  So an edited test is judged anew, and the others only where something they share changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Suite:
    """The tests under ``folder``."""

    folder: Path
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)  # of each test function
    _shared: str = ""
    modules: set[str] = field(default_factory=set)  # what the tests import

    def __post_init__(self) -> None:
        files = [
            path
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
        ]
        trees = {path: tree for path in files if (tree := _parsed(path)) is not None}
        self.modules = {name for tree in trees.values() for name in _imported(tree)}
        used = Counter(name for tree in trees.values() for name in _used(tree))
        shared = []
        for path in files:
            name = path.relative_to(self.folder).as_posix()
            if path in trees:
                self._take_out_tests(name, path, trees[path], used)
                shared.append(f"{name}\0{ast.unparse(trees[path])}")
            else:
                shared.append(f"{name}\0{digest(path.read_bytes().decode('utf-8', 'replace'))}")
        self._shared = digest("\0".join(shared))

    def key(self, test: str) -> str:
        """The digest for one of pytest's node ids, such as "test_ring.py::test_sum[3]"."""
        path, _, inside = test.partition("::")
        name = re.sub(r"\[.*", "", inside, flags=re.S).replace("::", ".")
        own = self._texts.get((path, name), self.digest)  # inherited, imported: anything may matter
        return digest(self._shared + test + own)

    @property
    def digest(self) -> str:
        """The digest of the whole suite."""
        return digest(self._shared + repr(sorted(self._texts.items())))

    def count(self) -> int:
        """How many test functions there are."""
        return len(self._texts)

    def _take_out_tests(self, name: str, path: Path, tree: ast.Module, used: Counter[str]) -> None:
        """Keep a file's tests apart, unless other code uses them or the file."""
        is_test_file = path.name.startswith("test_") or path.name.endswith("_test.py")
        if is_test_file and path.stem not in {m.split(".")[-1] for m in self.modules}:
            for inside, siblings, test in _tests(tree):
                if not any(used[part] for part in inside.split(".")):
                    self._texts[name, inside] = ast.unparse(test)
                    siblings.remove(test)


def digest(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _tests(tree: ast.Module) -> list[tuple[str, list[ast.stmt], ast.FunctionDef]]:
    """Each test's name, the body that it stands in, and the test."""
    bodies = [("", tree.body)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies += [(f"{c.name}.", c.body) for c in classes if c.name.startswith("Test")]
    return [
        (prefix + node.name, body, node)
        for prefix, body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


def _parsed(path: Path) -> ast.Module | None:
    """A Python file's code; comments and layout do not matter."""
    try:
        return ast.parse(path.read_bytes()) if path.suffix == ".py" else None
    except (SyntaxError, ValueError):
        return None


def _used(tree: ast.Module) -> Iterator[str]:
    """Every name that a file's code mentions, without those that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


def _imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found
