"""Other right solutions: tests that fail on one of them insist on more than the contract says."""

from __future__ import annotations

import ast
import symtable

from ol.catalogue import Module
from ol.mutants import Subject


def wheats(module: Module, source: str) -> dict[str, Subject]:
    """Other right versions of the module, by what they are called in a report."""
    found = {
        f"another solution ({path.name})": Subject(path.stem, path.read_text("utf-8"), alone=True)
        for path in sorted(module.wheats.glob("*.py"))
    }
    found["the reference with other names inside"] = Subject("renamed", renamed(source))
    return found


def renamed(source: str) -> str:
    """The source laid out anew, without comments, with another name for every local variable.

    Parameters keep their names: callers use them.
    """
    tree = ast.parse(source)
    _rename(tree, symtable.symtable(source, "source", "exec"), {})
    return ast.unparse(tree) + "\n"


def _rename(node: ast.AST, scope: symtable.SymbolTable, names: dict[str, str]) -> None:
    """Rename in ``scope``'s own code, then in the functions and comprehensions inside it."""
    inner = {(child.get_lineno(), child.get_name()): child for child in scope.get_children()}
    for child in ast.iter_child_nodes(node):
        table = _table_of(child, inner)
        if table is not None:
            _rename(child, table, _visible(table, names))
            continue
        if isinstance(child, ast.Name):
            child.id = names.get(child.id, child.id)
        _rename(child, scope, names)


_ANONYMOUS = {
    ast.Lambda: "lambda",
    ast.ListComp: "listcomp",
    ast.SetComp: "setcomp",
    ast.DictComp: "dictcomp",
    ast.GeneratorExp: "genexpr",
}


def _table_of(
    node: ast.AST, inner: dict[tuple[int, str], symtable.SymbolTable]
) -> symtable.SymbolTable | None:
    name = _ANONYMOUS.get(type(node), getattr(node, "name", ""))
    return inner.get((getattr(node, "lineno", 0), name))


def _visible(table: symtable.SymbolTable, outer: dict[str, str]) -> dict[str, str]:
    """What names become in a scope: its own locals new ones, those around it as they are there."""
    names = {name: new for name, new in outer.items() if name not in _bound(table)}
    if isinstance(table, symtable.Function):
        own = set(table.get_locals()) - set(table.get_parameters())
        names |= {name: f"{name}_" for name in own}
    return names


def _bound(table: symtable.SymbolTable) -> set[str]:
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_local()}
