"""What the course contains, read from course.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnknownModuleError(Exception):
    """No such module in the course; the message lists those that there are."""


@dataclass(frozen=True)
class CourseTest:
    """One of the course's own tests of a module."""

    name: str
    kind: str
    checks: str
    why: str


@dataclass(frozen=True)
class Module:
    """A module of the course; ``file`` and ``own_tests`` are relative to a learner's repository."""

    name: str
    title: str
    threshold: float  # of the mutants that a suite has to notice
    file: Path  # what the learner writes
    own_tests: Path  # the folder of the learner's tests
    tests: tuple[CourseTest, ...]
    course_tests: Path
    contract: Path
    chapter: Path
    example: Path  # the first of the learner's tests
    pitfalls: Path  # a folder
    equivalents: Path
    wheats: Path  # a folder of other right solutions

    @property
    def import_name(self) -> str:
        """What is imported: "tinyllm.dist.comm"."""
        return ".".join(self.inside.with_suffix("").parts)

    @property
    def inside(self) -> Path:
        """The file relative to the folder that is on the path."""
        return self.file.relative_to("python")


def course_folder() -> Path:
    """The course: beside the code in a clone, inside the package where a wheel was installed."""
    here = Path(__file__).resolve().parent
    installed = here / "course"
    return installed if installed.is_dir() else here.parents[1] / "course"


def reference_package(module: Module) -> Path:
    """The package that has the reference in it; it lies beside this one, and is never imported."""
    return Path(__file__).resolve().parents[1] / module.inside.parts[0]


def reference(module: Module) -> Path:
    """The reference's file."""
    return reference_package(module).parent / module.inside


def names() -> list[str]:
    """The modules of the course."""
    return list(_modules())


def module(name: str) -> Module:
    """The module ``name``, such as "L11.2"; UnknownModuleError if there is none."""
    modules, folder = _modules(), course_folder()
    if name not in modules:
        raise UnknownModuleError(f"no module {name!r} in this course; it has {', '.join(modules)}")
    entry = modules[name]
    inside = ("course_tests", "contract", "chapter", "example", "pitfalls", "equivalents", "wheats")
    return Module(
        name=name,
        title=entry["title"],
        threshold=entry["threshold"],
        file=Path(entry["file"]),
        own_tests=Path(entry["own_tests"]),
        tests=tuple(CourseTest(**test) for test in entry["tests"]),
        **{key: folder / entry[key] for key in inside},
    )


def _modules() -> dict[str, Any]:
    text = (course_folder() / "course.toml").read_text(encoding="utf-8")
    modules: dict[str, Any] = tomllib.loads(text)["modules"]
    return modules
