"""Mutations of a source file by mutmut's generator: the one place that knows mutmut.

mutmut is a program; what it generates mutations with is no public interface.  So its version is
pinned, this module alone touches it, and a test compares what comes out with mutmut's own way to
apply a mutation (which visits the whole tree for each and takes 20 ms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ParentNodeProvider
from mutmut import configuration
from mutmut.mutation.file_mutation import create_mutations


@dataclass(frozen=True)
class Mutation:
    """One change of a source."""

    source: str  # the whole of it, changed
    line: int  # where the change begins, from 1
    old: str  # the code that was exchanged
    new: str
    kind: str  # libcst's name of the node: Integer, ComparisonTarget, Call, ...
    touched: str  # of a call, the argument that was exchanged or left out; else as ``old``
    role: str  # "argument" in a call, "default" of a parameter, or ""
    parameter: str  # the name of that parameter


def mutations(source: str) -> list[Mutation]:
    """Every mutation of ``source``, in the order of its text."""
    nothing: Any = SimpleNamespace(do_not_mutate_patterns=[])
    configuration._config = nothing  # else it reads the current folder's
    module, found, _, _ = create_mutations("source.py", source)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    spans: Any = wrapper.resolve(ByteSpanPositionProvider)
    parents: Any = wrapper.resolve(ParentNodeProvider)
    text = source.encode()
    made = []
    for mutation in found:
        old, new = mutation.original_node, mutation.mutated_node
        span = spans[old]  # without the parentheses around it, so the new node goes without, too
        if getattr(new, "lpar", None):
            new = new.with_changes(lpar=[], rpar=[])
        end = span.start + span.length
        code, before = module.code_for_node(new), text[span.start : end].decode()
        if (
            before == before.strip()
        ):  # the span of some operators has the spaces around it, of some not
            code = code.strip()
        touched = _touched(old, mutation.mutated_node) or old
        parent = parents[touched]
        parameter = parent.name.value if isinstance(parent, cst.Param) else ""
        made.append(
            Mutation(
                source=(text[: span.start] + code.encode() + text[end:]).decode(),
                line=text.count(b"\n", 0, span.start) + 1,
                old=before.strip(),
                new=code.strip(),
                kind=type(old).__name__,
                touched=module.code_for_node(touched).strip(),
                role=_ROLES.get(type(parent).__name__, ""),
                parameter=parameter,
            )
        )
    return sorted(made, key=lambda mutation: mutation.line)


_ROLES = {"Arg": "argument", "Param": "default"}


def _touched(old: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode | None:
    """The value of the argument in which two calls differ; None for what is no such call."""
    if not (isinstance(old, cst.Call) and isinstance(new, cst.Call)):
        return None
    kept: Sequence[cst.Arg] = new.args
    return next((arg.value for arg in old.args if not any(arg is other for other in kept)), None)
