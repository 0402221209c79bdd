"""Folders in which code is judged: a copy of the library with one file of it exchanged."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import py_compile
import queue
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def rooms(package: Path, module: str) -> list[str]:
    """The package's modules that do not lead to ``module``: they are the same in every library.

    Packages are not among them: a package knows the folder that its modules come from.
    """
    folder = package.parent
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    leads = {name: set(_imports(path, files)) for name, path in files.items()}
    tainted = {module}
    while more := {n for n in files if n not in tainted and leads[n] & tainted}:
        tainted |= more
    return sorted(name for name in files.keys() - tainted if files[name].name != "__init__.py")


def _imports(path: Path, names: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else str(node.module)


class Stage:
    """A temporary folder with the reference's library and one suite of tests in it.

    ``library(source)`` is the library with ``source`` in the module's place: links to the
    reference's files, all compiled once, and a file of its own.
    """

    def __init__(self, folder: Path, package: Path, module_file: Path) -> None:
        """``package`` is the reference's top folder, ``module_file`` relative to its parent."""
        self._folder = folder.resolve()
        self._module_file = module_file
        self._reference = self._folder / "reference"
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        shutil.copytree(package, self._reference / package.name, ignore=_NO_CACHES)
        compileall.compile_dir(self._reference, quiet=1)

    @contextmanager
    def library(self, source: str) -> Iterator[Path]:
        """A folder for the front of sys.path, for the time of one run.

        The next run gets the same folder with another module in it: making one takes 40 links.
        """
        try:
            library = self._free.get_nowait()
        except queue.Empty:
            library = self._linked()
        judged = library / self._module_file
        judged.write_text(source, encoding="utf-8")
        cache = Path(importlib.util.cache_from_source(str(judged)))
        cache.unlink(missing_ok=True)  # whatever its time says: it is another source's
        py_compile.compile(str(judged), quiet=2)
        try:
            yield library
        finally:
            self._free.put(library)

    def _linked(self) -> Path:
        """A library whose files are the reference's, except the judged one."""
        library = Path(tempfile.mkdtemp(dir=self._folder, prefix="library-"))
        module = self._reference / self._module_file
        for original in self._reference.rglob("*"):
            copy = library / original.relative_to(self._reference)
            if original.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif not original.name.startswith(f"{module.stem}."):
                copy.symlink_to(original)
        return library

    def bare_library(self, source: str) -> Path:
        """A package that holds the module and nothing else, as a learner's does."""
        library = Path(tempfile.mkdtemp(dir=self._folder, prefix="bare-"))
        judged = library / self._module_file
        judged.parent.mkdir(parents=True)
        for folder in judged.relative_to(library).parents[:-1]:
            (library / folder / "__init__.py").touch()
        judged.write_text(source, encoding="utf-8")
        return library

    def learners_library(self, python: Path) -> Path:
        """The learner's own package, as it is, instead of the reference's."""
        library = Path(tempfile.mkdtemp(dir=self._folder, prefix="learner-"))
        package = self._module_file.parts[0]
        shutil.copytree(python / package, library / package, ignore=_NO_CACHES)
        return library

    def tests(self, name: str, tests: Path) -> Path:
        """A copy of a folder of tests, or of one file, out of the reach of other configuration."""
        folder = self._folder / "tests" / name
        if tests.is_dir():
            shutil.copytree(tests, folder, ignore=_NO_CACHES, dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(tests, folder)
        return folder

    def scratch(self) -> Path:
        """An empty folder for one run."""
        return Path(tempfile.mkdtemp(dir=self._folder, prefix="run-"))
