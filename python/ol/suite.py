"""A folder of tests by content: what each test's verdicts depend on.

A test's key is a digest of its own text and of all in the folder that is no test: helpers, workers,
fixtures.  So an edited test is judged anew, and the others only where something they share changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
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
        shared = []
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts):
                name = path.relative_to(self.folder).as_posix()
                shared.append(name + "\0" + self._rest(name, path))
        self._shared = digest("\0".join(shared))

    def key(self, test: str) -> str:
        """The digest for one of pytest's node ids, such as "test_ring.py::test_sum[3]"."""
        path, _, inside = test.partition("::")
        name = re.sub(r"\[.*", "", inside, flags=re.S).replace("::", ".")
        return digest(self._shared + test + self._texts.get((path, name), ""))

    @property
    def digest(self) -> str:
        """The digest of the whole suite."""
        return digest(self._shared + repr(sorted(self._texts.items())))

    def count(self) -> int:
        """How many test functions there are."""
        return len(self._texts)

    def _rest(self, name: str, path: Path) -> str:
        """What is in a file beside its tests, which are kept apart; comments and layout are not."""
        data = path.read_bytes()
        try:
            tree = ast.parse(data if path.suffix == ".py" else "?")
        except (SyntaxError, ValueError):
            return digest(data.decode("utf-8", errors="replace"))
        self.modules |= _imported(tree)
        if path.name.startswith("test_") or path.name.endswith("_test.py"):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            for inside, siblings, test in _tests(tree):
                if test.name not in used:  # else another test or helper depends on it
                    self._texts[name, inside] = ast.unparse(test)
                    siblings.remove(test)
        return ast.unparse(tree)


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


def _imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found
