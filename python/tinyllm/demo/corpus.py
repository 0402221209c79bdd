"""The text that the demo trains on: any file, or the language reference that comes with CPython."""

from __future__ import annotations

from pathlib import Path

from tinyllm.demo.limits import DemoError

SHORTEST = 1_000  # bytes: with less, the held-out tenth would say nothing
LONGEST = 1 << 24  # bytes that are read of a file; a few hundred steps see far less


def language_reference() -> bytes:
    """The topics of Python's ``help()``, joined: half a megabyte of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DemoError("this Python comes without pydoc_data; give a text with --text") from None
    return "\n".join(topics.values()).encode()


def read(path: str) -> bytes:
    """The bytes of a file, or the DemoError that says why it will not do."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(LONGEST)
    except OSError as error:
        raise DemoError(f"--text {path}: {error.strerror}") from None
    if len(text) < SHORTEST:
        raise DemoError(f"--text {path}: {len(text):,} bytes; at least {SHORTEST:,} are needed")
    return text
