"""A claim that the demo prints, and whether the run bore it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """``tinyllm demo`` exits with 0 only if every one of these holds."""

    claim: str
    holds: bool
