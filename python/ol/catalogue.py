"""What the course contains, read from course.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


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
    """A module of the course."""

    name: str
    title: str
    file: Path  # what the learner writes, relative to the learner's repository
    course_tests: Path
    tests: tuple[CourseTest, ...]


def course_folder() -> Path:
    """The course: beside the code in a clone, inside the package where a wheel was installed."""
    here = Path(__file__).resolve().parent
    installed = here / "course"
    return installed if installed.is_dir() else here.parents[1] / "course"


def module(name: str) -> Module:
    """The module ``name``, such as "L11.2"; UnknownModuleError if there is none."""
    folder = course_folder()
    modules = tomllib.loads((folder / "course.toml").read_text(encoding="utf-8"))["modules"]
    if name not in modules:
        raise UnknownModuleError(f"no module {name!r} in this course; it has {', '.join(modules)}")
    entry = modules[name]
    return Module(
        name=name,
        title=entry["title"],
        file=Path(entry["file"]),
        course_tests=folder / entry["course_tests"],
        tests=tuple(CourseTest(**test) for test in entry["tests"]),
    )
