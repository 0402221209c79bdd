"""What a contract (a .pyi file) says: the names in it, and the stub that a learner begins with."""

from __future__ import annotations

import ast


def functions(contract: str) -> list[str]:
    """The functions and methods that the contract asks for: "spawn", "Comm.send", ..."""
    return [name for name, _ in _functions(ast.parse(contract))]


def parameters(source: str) -> dict[str, set[str]]:
    """The names of each function's parameters, in a contract or in code."""
    return {
        name: {arg.arg for arg in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)}
        for name, f in _functions(ast.parse(source))
    }


def first_sentences(contract: str) -> dict[str, str]:
    """The first line of each function's docstring."""
    return {
        name: (ast.get_docstring(function) or "").partition("\n")[0]
        for name, function in _functions(ast.parse(contract))
    }


def bodies(source: str) -> dict[str, str]:
    """The text of each function and method of a source, decorators and comments included."""
    lines = source.splitlines(keepends=True)
    found = {}
    for name, function in _functions(ast.parse(source)):
        first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        found[name] = "".join(lines[first - 1 : function.end_lineno])
    return found


def stub(contract: str, module: str) -> str:
    """A module that has all of the contract and does nothing yet: every call says what is missing.

    Signatures, types and docstrings are the contract's own.
    """
    tree = ast.parse(contract)
    for name, function in _functions(tree):
        message = f"{name} is yours to write; `ol tests {module}` lists what it is tested for"
        todo = ast.parse(f"raise NotImplementedError({message!r})").body
        docstring = [node for node in function.body[:1] if _is_docstring(node)]
        function.body = [*docstring, *todo]
    future = ast.parse("from __future__ import annotations").body
    start = 1 if tree.body and _is_docstring(tree.body[0]) else 0
    tree.body[start:start] = future
    return ast.unparse(ast.fix_missing_locations(tree)).rstrip() + "\n"


def _functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    found: list[tuple[str, ast.FunctionDef]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            inside = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            found += [(f"{node.name}.{member.name}", member) for member in inside]
    return found


def _is_docstring(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
