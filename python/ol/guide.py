"""What a learner is told on the way: where they are, a hint, and in the end the reference."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ol import catalogue, contract, mutants
from ol.catalogue import Module
from ol.grading import RED
from ol.suite import Suite
from ol.workspace import NoRepositoryError, RefusedError, Workspace, find

# -- diff ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One function of the contract, the learner's and the reference's."""

    function: str
    diff: str  # from the learner's to the reference's; "" where they are the same


def diff(workspace: Workspace) -> list[Difference]:
    """The learner's code beside the reference, function by function of the contract.

    RefusedError until a check of the present content has passed.
    """
    passed = workspace.state().get("passed")
    if not workspace.is_the_clone and passed != workspace.fingerprint():
        now = "has passed, but not as it is now" if passed else "has not passed yet"
        raise RefusedError(
            f"{workspace.module.file} {now}: `ol check {workspace.module.name}` first, then the"
            " reference is shown beside it"
        )
    module = workspace.module
    mine = contract.bodies(workspace.file.read_text(encoding="utf-8"))
    ours = contract.bodies(catalogue.reference(module).read_text(encoding="utf-8"))
    found = []
    for name in contract.functions(module.contract.read_text(encoding="utf-8")):
        lines = mine.get(name, "").splitlines(), ours.get(name, "").splitlines()
        changes = difflib.unified_diff(
            *lines, f"your {name}", f"the reference's {name}", "", "", 99
        )
        found.append(Difference(name, "\n".join(line.rstrip("\n") for line in changes)))
    return found


# -- hint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hint:
    """One step of help with one thing."""

    about: str
    step: int
    steps: int
    text: str


def hint(workspace: Workspace) -> Hint:
    """The next step of help with what the last check found first; each call goes a step further.

    RefusedError where no check has found anything to help with.
    """
    module, state = workspace.module, workspace.state()
    open_points = _open_points(state)
    if not open_points:
        raise RefusedError(f"there is nothing to hint at: `ol check {module.name}` finds what is")
    about = open_points[0]
    texts = _hints(module, about)
    given = state.get("hints", {})
    step = min(given.get(about, 0) + 1, len(texts))
    workspace.remember(hints=given | {about: step})
    return Hint(about, step, len(texts), texts[step - 1])


def _open_points(state: dict[str, Any]) -> list[str]:
    """What the last runs found wanting: first in the file, then in the tests."""
    return [*state.get("course", []), *state.get("own", [])]


def _hints(module: Module, about: str) -> list[str]:
    """From a nudge to nearly the answer; never code."""
    source = catalogue.reference(module).read_text(encoding="utf-8")
    faults = mutants.pitfalls(module, source)
    if about == RED:
        return [
            "A test of yours fails although the comm.py under it is right; `ol check` shows which.",
            "Compare it with the contract, sentence by sentence: does it ask for something that is"
            " promised nowhere, a private name, a message's wording, who is first? Or does it need"
            " what another test left behind?",
        ]
    for test in module.tests:
        if test.name == about:
            known = [fault for fault in faults if fault.caught_by == about]
            return [
                f"The course test {about} checks {test.checks}. It matters: {test.why}.",
                *(
                    f"A known way to fail it: {fault.title}. Then: {fault.symptom}."
                    for fault in known
                ),
                *(fault.hint for fault in known),
            ]
    for fault in faults:
        if fault.id == about:
            return [
                f"Somebody's comm.py is wrong, and your tests pass. One sees: {fault.symptom}.",
                f"The fault is: {fault.title}.",
                fault.hint,
                f"The course test {fault.caught_by} notices it: `ol tests {module.name}`.",
            ]
    function, _, sentence = about.partition(": ")
    promise = contract.first_sentences(module.contract.read_text(encoding="utf-8")).get(function)
    return [
        f"Your tests pass on a reference in which one thing was changed, in {function}.",
        f"What it shows: {sentence}.",
        *([f"The contract says of {function}: {promise}"] if promise else []),
        "Let data differ per rank and per entry, try worlds 1 to 5, sizes that the world does not"
        " divide, and look at all that a call returns and counts.",
    ]


# -- status ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """Where a learner is with one module."""

    module: str
    title: str
    lines: list[str]
    next: str


def status(module: Module, start: Path) -> Status:
    """What there is of a module around ``start``, and what comes next."""
    try:
        workspace = find(module, start)
    except NoRepositoryError:
        return Status(module.name, module.title, ["not begun here"], f"ol start {module.name}")
    state = workspace.state()
    pyi = module.contract.read_text(encoding="utf-8")
    untouched = workspace.text() == contract.stub(pyi, module.name)
    tests = Suite(workspace.own_tests).count() if workspace.own_tests.is_dir() else 0
    what = "the stub" if untouched else "the reference" if workspace.is_the_clone else "begun"
    many = "1 test" if tests == 1 else f"{tests} tests"
    lines = [f"{module.file}: {what}", f"{module.own_tests}: {many}"]
    for command in ("check", "mutate"):
        if command in state:
            known = state[command]
            (noticed, pitfalls), (killed, of) = known["pitfalls"], known["mutants"]
            passed = "passed" if known["passed"] else "not yet"
            lines.append(
                f"{command}: {passed}, pitfalls {noticed} of {pitfalls}, mutants {killed} of {of}"
            )
    if untouched:
        then = f"ol tests {module.name}, then write {module.file.name}"
    elif "check" not in state:
        then = f"ol check {module.name}"
    elif state.get("passed") != workspace.fingerprint():
        then = f"ol hint {module.name}" if _open_points(state) else f"ol check {module.name}"
    else:
        then = f"ol diff {module.name}"
    return Status(module.name, module.title, lines, then)
