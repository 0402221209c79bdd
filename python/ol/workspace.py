"""A learner's repository: where it is, what `start` puts there, what is remembered of it."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ol import catalogue, contract
from ol.catalogue import Module
from ol.suite import digest
from ol.verdicts import write_atomically


class RefusedError(Exception):
    """What was asked for would overwrite somebody's work, or show what is not yet theirs."""


class NoRepositoryError(Exception):
    """There is nothing to judge here."""


@dataclass(frozen=True)
class Workspace:
    """A repository that a module is worked on in."""

    module: Module
    root: Path

    @property
    def file(self) -> Path:
        """What the learner writes."""
        return self.root / self.module.file

    @property
    def own_tests(self) -> Path:
        """The learner's tests."""
        return self.root / self.module.own_tests

    @property
    def is_the_clone(self) -> bool:
        """Whether the reference itself lies here."""
        reference = catalogue.reference(self.module)
        return self.file.is_file() and self.file.samefile(reference)

    @property
    def package(self) -> Path:
        """The package that the file is in."""
        return self.root / "python" / self.module.inside.parts[0]

    def state_folder(self) -> Path:
        """What the commands remember; derived, and not to be committed."""
        folder = self.root / ".ol"
        if not folder.is_dir():
            write_atomically(folder / ".gitignore", "*\n")
        return folder / self.module.name

    def state(self) -> dict[str, Any]:
        """What the last check found, and the hints that were given."""
        with suppress(OSError, ValueError):
            known: dict[str, Any] = json.loads((self._state_file()).read_text(encoding="utf-8"))
            return known
        return {}

    def remember(self, **what: Any) -> None:
        """Add to the state."""
        text = json.dumps(self.state() | what, indent=1)
        write_atomically(self.state_folder() / "state.json", text)

    def fingerprint(self) -> str:
        """Names the present content of file and tests: a check of other content says nothing."""
        files = [self.file, *sorted(self.own_tests.rglob("*.py"))]
        return digest("\0".join(f"{path}\0{_text(path)}" for path in files))

    def text(self) -> str:
        """What the learner has written so far; "" without a file."""
        return _text(self.file)

    def file_digest(self) -> str:
        """Names the file's present content."""
        return digest(self.text())

    def package_digest(self) -> str:
        """Names the content of the package that the file is in."""
        files = sorted(self.package.rglob("*.py"))
        return digest("\0".join(f"{path}\0{_text(path)}" for path in files))

    def _state_file(self) -> Path:
        return self.root / ".ol" / self.module.name / "state.json"


def find(module: Module, start: Path) -> Workspace:
    """The nearest repository from ``start`` upwards; NoRepositoryError where there is none."""
    for folder in (start, *start.parents):
        if (folder / module.file).is_file() or (folder / module.own_tests).is_dir():
            return Workspace(module, folder)
    raise NoRepositoryError(
        f"no {module.file} here or in a folder above; `ol start {module.name}` makes one here"
    )


def start(module: Module, root: Path, force: bool) -> list[str]:
    """Hand the module out into ``root``; returns a line for each file, of what was done.

    RefusedError, and nothing written, where a file there differs from what would be written;
    with ``force`` such a file is kept beside the new one.
    """
    workspace = Workspace(module, root)
    if workspace.is_the_clone:
        raise RefusedError(
            f"{module.file} here is the reference; `ol start {module.name} --into DIR` begins"
            " somewhere else"
        )
    texts = _handed_out(module)
    differing = {
        path: text
        for path, text in texts.items()
        if (root / path).exists() and _text(root / path) != text and path.name != "__init__.py"
    }
    if differing and not force:
        raise RefusedError(_refusal(root, differing))
    root.mkdir(parents=True, exist_ok=True)
    told = []
    with tempfile.TemporaryDirectory(dir=root, prefix=".ol-start-") as staging:
        for number, text in enumerate(texts.values()):
            (Path(staging) / str(number)).write_text(text, encoding="utf-8")
        for number, path in enumerate(texts):
            target = root / path
            if target.exists() and path not in differing:
                told.append(f"kept     {path}")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if path in differing:
                told.append(f"backup   {_backup(target).relative_to(root)}")
            os.replace(Path(staging) / str(number), target)
            told.append(f"wrote    {path}")
    return told


def _handed_out(module: Module) -> dict[Path, str]:
    """The files that a learner begins with."""
    texts = {Path("python", *folder.parts, "__init__.py"): "" for folder in _packages(module)}
    pyi = module.contract.read_text(encoding="utf-8")
    texts[module.file] = contract.stub(pyi, module.name)
    for path in (module.example, module.example.with_name("conftest.py")):
        texts[module.own_tests / path.name] = path.read_text(encoding="utf-8")
    return texts


def _packages(module: Module) -> list[Path]:
    return [folder for folder in module.inside.parents if folder.parts][::-1]


def _refusal(root: Path, differing: dict[Path, str]) -> str:
    told = ["nothing was written: these files are there already, with your work in them"]
    for path, text in differing.items():
        mine, new = _text(root / path).splitlines(), text.splitlines()
        changes = [d[0] for d in difflib.unified_diff(new, mine, n=0) if d[:2] not in ("++", "--")]
        more, fewer = changes.count("+"), changes.count("-")
        told.append(f"  {path}: {more} lines that a new one has not, {fewer} that it has besides")
    told.append("--force writes new ones and keeps these beside them; --into DIR goes elsewhere")
    return "\n".join(told)


def _backup(path: Path) -> Path:
    """Copy a file to the first free name beside it, one that pytest and Python pass over."""
    number = 1
    while (copy := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
