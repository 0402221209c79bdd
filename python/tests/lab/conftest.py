"""Programs of the labs, which leave nothing when a test is over."""

from __future__ import annotations

import pytest
from lab_programs import Program


@pytest.fixture
def start():
    programs = []

    def begin(*args, **options):
        programs.append(Program(*args, **options))
        return programs[-1]

    yield begin
    for program in programs:
        program.end()
