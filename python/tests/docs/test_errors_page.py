"""course/docs/errors.md says what the library says today."""

from __future__ import annotations

import re
from pathlib import Path

import errors_page

import tinyllm.dist.errors

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "course/docs/errors.md").read_text()


def steady(text: str) -> list[str]:
    """Titles and headlines, without what changes from run to run: who was first to notice."""
    text = re.sub(r"\brank \d", "rank N", text)
    return [line for line in text.splitlines() if re.match(r"#|    \w*(Error|Died|Timeout)", line)]


def test_the_page_is_what_the_library_prints() -> None:
    assert steady(errors_page.page()) == steady(PAGE)


def test_every_error_has_its_place() -> None:
    for name in tinyllm.dist.errors.__all__:
        assert name in PAGE
