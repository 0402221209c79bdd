"""The house: who may import whom, what comm.py may know, and code and contract side by side."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from pathlib import Path

import pytest

import tinyllm.dist
from tinyllm.dist import comm

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python/tinyllm"
CONTRACT = ROOT / "course/contracts/py/tinyllm/dist/comm.pyi"

# Top down: a module imports only from lines below its own.
LAYERS = [
    {"tinyllm.__main__"},
    {"tinyllm.cli"},
    {"tinyllm.bench", "tinyllm.demo"},
    {"tinyllm.progress", "tinyllm.screen"},
    {"tinyllm.dist"},
    {
        "tinyllm.dist.algorithms",
        "tinyllm.dist.nonblocking",
        "tinyllm.dist.shm",
        "tinyllm.dist.tcp",
    },
    {"tinyllm.dist.plans"},
    {"tinyllm.dist.comm", "tinyllm.dist.symmetric"},
    {"tinyllm.dist.launch", "tinyllm.dist.segment"},
    {"tinyllm.dist.member", "tinyllm.dist.verdict"},
    {"tinyllm.dist.child", "tinyllm.dist.port"},
    {"tinyllm.dist.diagnosis", "tinyllm.dist.link"},
    {"tinyllm.dist.board", "tinyllm.dist.preflight", "tinyllm.dist.mailbox"},
    {"tinyllm.dist.arrays", "tinyllm.dist.frame"},
    {"tinyllm.dist.errors"},
    {"tinyllm"},
]

COMMANDS = ("tinyllm.bench", "tinyllm.demo")  # packages whose rooms may import each other


def layer(module: str) -> int:
    """The layer of a module, or of the package that it belongs to."""
    while module:
        for depth, names in enumerate(LAYERS):
            if module in names:
                return depth
        module = module.rpartition(".")[0]
    raise AssertionError("no layer")


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imported(tree: ast.Module, known: typing.Container[str]) -> set[str]:
    """The modules that a module imports, those inside functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in known else str(node.module))
    return names


def test_imports_run_downwards() -> None:
    known = modules()
    for name, tree in known.items():
        for other in imported(tree, known):
            if other.startswith("tinyllm") and not other.startswith(
                ("tinyllm.bench", "tinyllm.demo")
            ):
                assert layer(other) > layer(name), f"{name} imports {other}"


def test_the_library_needs_numpy_alone() -> None:
    import sys

    known = modules()
    for name, tree in known.items():
        if name.startswith("tinyllm.dist"):
            roots = {other.partition(".")[0] for other in imported(tree, known)}
            assert roots <= {"tinyllm", "numpy"} | sys.stdlib_module_names, name


def test_nobody_outside_looks_behind_the_face() -> None:
    known = modules()
    for name, tree in known.items():
        if not name.startswith("tinyllm.dist"):
            inside = {other for other in imported(tree, known) if other.startswith("tinyllm.dist.")}
            named = {f"tinyllm.dist.{room}" for room in tinyllm.dist.__all__}
            assert inside <= {"tinyllm.dist.comm"} | named, name


def test_the_taught_file_is_a_chapter() -> None:
    source = inspect.getsource(comm)
    assert source.count("\n") <= 250
    roots = {name.partition(".")[0] for name in imported(ast.parse(source), modules())}
    assert not roots & {"struct", "socket", "os", "signal", "ctypes", "selectors", "pickle"}


def test_the_face_draws_every_room() -> None:
    drawn = set(re.findall(r"^ +(\w+)  +\w", tinyllm.dist.__doc__, re.M))
    rooms = {path.stem for path in (PACKAGE / "dist").glob("*.py")} - {"__init__"}
    assert drawn == rooms


# -- the contract ----------------------------------------------------------------------------------


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def contract() -> tuple[dict[str, ast.FunctionDef], dict[str, ast.FunctionDef], list[str]]:
    body = ast.parse(CONTRACT.read_text()).body
    (klass,) = [node for node in body if isinstance(node, ast.ClassDef)]
    attributes = [node.target.id for node in klass.body if isinstance(node, ast.AnnAssign)]
    return functions(body), functions(klass.body), attributes


def parameters(node: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Names and defaults, as far as callers of the contract see them."""
    arguments = node.args.posonlyargs + node.args.args
    defaults = [None] * (len(arguments) - len(node.args.defaults)) + node.args.defaults
    pairs = list(zip(arguments, defaults, strict=True))
    if node.args.vararg:
        pairs.append((node.args.vararg, None))
    pairs += list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
    return [(arg.arg, ast.unparse(value) if value else None) for arg, value in pairs]


@pytest.mark.parametrize("where", ["module", "Comm"])
def test_code_and_contract_agree(where: str) -> None:
    in_module, in_class, attributes = contract()
    promised = in_module if where == "module" else in_class
    body = ast.parse(inspect.getsource(comm)).body
    if where == "Comm":
        (klass,) = [node for node in body if isinstance(node, ast.ClassDef)]
        body = klass.body
        assert sorted(attributes) == ["bytes_sent", "rank", "world"]
    code = functions(body)
    for name, node in promised.items():
        ours, theirs = parameters(code[name]), parameters(node)
        assert ours[: len(theirs)] == theirs, name
        extras = {arg for arg, _ in ours[len(theirs) :]}
        keyword_only = {arg.arg for arg in code[name].args.kwonlyargs}
        assert extras <= keyword_only, f"{name}: extras are keyword-only"
        assert all(default for _, default in ours[len(theirs) :]), f"{name}: extras have defaults"
    public = {name for name in code if not name.startswith("_")}
    assert public - set(promised) <= {"pipe_mesh", "empty"}, "more than the contract and its extras"
