"""What is known of tests on subjects: kept on disk by content, so that nothing is run twice."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SAVE_EVERY = 1.0  # seconds


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Verdicts:
    """Results by subject and test, each named by a digest; all of one engine.

    Another version of Python, NumPy or the grader begins anew.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._saved = time.monotonic()
        self._all: dict[str, Any] = {"engine": engine, "results": {}, "collected": {}, "last": {}}
        with suppress(OSError, ValueError):  # absent, or unreadable: it is only a cache
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["engine"] == engine and known.keys() == self._all.keys():
                self._all = known

    def known(self, subject: str) -> dict[str, Any]:
        """The results of a subject, by test key."""
        return dict(self._all["results"].get(subject, {}))

    def note(self, subject: str, test: str, result: dict[str, Any]) -> None:
        """Keep one result."""
        with self._lock:
            self._all["results"].setdefault(subject, {})[test] = result
            if time.monotonic() - self._saved > SAVE_EVERY:
                self._save()

    def killer(self, subject: str) -> str:
        """The test that noticed the subject last time, whatever has been edited since."""
        return str(self._all["last"].get(subject, ""))

    def note_killer(self, subject: str, test: str) -> None:
        """Remember it."""
        self._all["last"][subject] = test

    def collected(self, suite: str) -> list[str] | None:
        """The tests that pytest found in a suite, by the suite's digest."""
        found: list[str] | None = self._all["collected"].get(suite)
        return found

    def note_collected(self, suite: str, tests: list[str]) -> None:
        """Remember them; of one suite, the present one."""
        self._all["collected"] = {suite: tests}

    def keep(self, tests: set[str]) -> None:
        """Forget the results of tests that are no more, once that is worth while."""
        with self._lock:
            known = sum(map(len, self._all["results"].values()))
            kept = {
                subject: {test: result for test, result in results.items() if test in tests}
                for subject, results in self._all["results"].items()
            }
            if known > 2 * sum(map(len, kept.values())):
                self._all["results"] = kept
            self._save()

    def save(self) -> None:
        """Write what is new."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        write_atomically(self._path, json.dumps(self._all))
        self._saved = time.monotonic()
