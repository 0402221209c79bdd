"""Collectives over Python processes.

    train -> dist (this face) -> {tcp, shm, algorithms, nonblocking}
          -> comm -> {port, arrays, launch} -> ...

    algorithms   all-reduce by a tree, by doubling, by halving, naively
    nonblocking  the collectives again, in futures
    tcp          tcp_mesh: the same over TCP on loopback
    shm          shm_mesh: the same through shared memory
      segment      that memory, and how the ranks meet in it
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

from tinyllm.dist import algorithms, nonblocking
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
