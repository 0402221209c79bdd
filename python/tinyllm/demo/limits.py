"""What this machine cannot do, found out before anything starts."""

from __future__ import annotations

import os

from tinyllm.dist import pipe_mesh


class DemoError(ValueError):
    """What the user asked for cannot be done; the message is one line."""


def check_world(option: str, world: int) -> None:
    """A pipe between each two ranks: a process may not have that many, so try."""
    try:
        for ends in pipe_mesh(world):
            ends.close()
    except OSError as error:
        raise DemoError(f"{option} {world}: {error.strerror}") from None


def check_memory(world: int, size: int) -> None:
    """The naive all-gather puts all vectors on every rank: first piece by piece, then joined."""
    needed = world * (2 * world + 4) * size * 8
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise DemoError(
            f"--world {world} --size {size}: to gather all vectors on all ranks takes"
            f" {needed / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB"
        )
