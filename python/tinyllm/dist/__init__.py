"""Collectives over Python processes.

    train -> dist (this face) -> {tcp, shm, algorithms, nonblocking}
          -> comm -> {port, arrays, launch} -> ...

    algorithms   all-reduce by a tree, by doubling, by halving, naively
    nonblocking  the collectives again, in futures
    tcp          tcp_mesh: the same over TCP on loopback
    shm          shm_mesh: the same through shared memory
      plans        its ways of all-reduce, prepared once for each kind of array
      symmetric    arrays that all ranks share
      segment      the memory, and how the ranks meet in it
    comm         the chapter in code: chunk_bounds, Comm, pipe_mesh, spawn
      launch       start processes, wait for any, end them
        verdict      what went wrong, in words
        member       one rank as the parent sees it
        child        what a rank's process does
        mailbox      the private channel between parent and rank
        preflight    what can be said before anything starts
      port         one rank's side of the mesh: links, numbering, header check
        link         one duplex byte channel to one peer
      diagnosis    who disagrees, who waits for whom, whose fault it is
      board        who is in which operation, in shared memory
      frame        the header of every message
      arrays       what arrays and out= may be
    errors       every error class

The import rule: a module imports only from below itself in this list, and nobody outside imports
anything but this face and ``tinyllm.dist.comm``.  A test walks the imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinyllm.dist.comm import Comm, chunk_bounds, pipe_mesh, spawn
from tinyllm.dist.errors import (
    CommError,
    CommTimeout,
    DesyncError,
    FrameError,
    PeerLost,
    RankDied,
    RankError,
)
from tinyllm.dist.launch import cores

if TYPE_CHECKING:
    from tinyllm.dist import algorithms, nonblocking
    from tinyllm.dist.shm import shm_mesh
    from tinyllm.dist.tcp import tcp_mesh

__all__ = [
    "Comm",
    "CommError",
    "CommTimeout",
    "DesyncError",
    "FrameError",
    "PeerLost",
    "RankDied",
    "RankError",
    "algorithms",
    "chunk_bounds",
    "cores",
    "nonblocking",
    "pipe_mesh",
    "shm_mesh",
    "spawn",
    "tcp_mesh",
]

# Each rank imports this face; loading these rooms would take it as long as all the others together.
_LATER = {"algorithms": "", "nonblocking": "", "shm_mesh": "shm", "tcp_mesh": "tcp"}


def __getattr__(name: str) -> Any:
    """Load one of those rooms when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"{__name__}.{_LATER[name] or name}")
    return getattr(room, name) if _LATER[name] else room
