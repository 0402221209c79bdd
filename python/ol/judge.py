"""Run the course tests of a module against a learner's file, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from ol.catalogue import Module

LIMIT = 300.0  # seconds for all course tests of a module; they take some ten


class WrongFileError(Exception):
    """Python imports another file than the one that is to be judged."""


@dataclass(frozen=True)
class Verdict:
    """How one course test ended; ``message`` is empty where it passed."""

    test: str
    message: str

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return not self.message


def find_repository(module: Module, start: Path) -> Path | None:
    """The nearest folder from ``start`` upwards that holds the module's file."""
    for folder in (start, *start.parents):
        if (folder / module.file).is_file():
            return folder
    return None


def judge(module: Module, repository: Path) -> list[Verdict]:
    """The verdict of each course test on ``repository``'s file, in the catalogue's order.

    WrongFileError where an import would not find that very file.
    """
    target = (repository / module.file).resolve()
    source = next(folder for folder in target.parents if folder.name == "python")
    name = ".".join(target.relative_to(source).with_suffix("").parts)
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    _check_import(name, target, environment)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", module.course_tests],
            cwd=folder,
            env=environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.DEVNULL,
            timeout=LIMIT,
        )
        return _verdicts(module, report)


def _check_import(name: str, target: Path, environment: dict[str, str]) -> None:
    """An installed package must never be judged in the learner's place."""
    find = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else '')"
    found = subprocess.run(
        [sys.executable, "-c", find], env=environment, capture_output=True, text=True, cwd=os.sep
    )
    if Path(found.stdout.strip() or os.sep).resolve() != target:
        told = found.stdout.strip() or found.stderr.strip() or "nothing"
        raise WrongFileError(f"import {name} finds {told}, not {target}")


def _reason(fault: ET.Element) -> str:
    """What pytest says of a fault: its message, or where there is none the lines marked E."""
    message = fault.get("message", "")
    marked = [line[1:].strip() for line in (fault.text or "").splitlines() if line[:2] == "E "]
    return "\n".join(marked) if message == "collection failure" else message or fault.tag


def _verdicts(module: Module, report: Path) -> list[Verdict]:
    found: dict[str, str] = {}
    outside = "it did not run"
    if report.exists():
        for case in ET.parse(report).iter("testcase"):  # written by pytest, just now
            faults = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
            told = [_reason(fault) for fault in faults]
            found[case.get("name", "")] = "\n".join(told)
            if told and case.get("name") not in {test.name for test in module.tests}:
                outside = told[0]  # the file could not be imported
    return [Verdict(test.name, found.get(test.name, outside)) for test in module.tests]
