"""What can go wrong between ranks, as classes.

    RuntimeError
      CommError             anything below; also a Comm that is used after it failed
        RankError           a rank raised: carries its traceback as text
        RankDied            a rank's process ended without returning: exit code or signal
        PeerLost            the other end of a link is gone, for a reason that lies elsewhere
        DesyncError         two ranks are not in the same call: shows both sides
        FrameError          bytes that are no message of ours
        CommTimeout         the deadline passed; a TimeoutError too

Misuse that one rank can see alone (a bad rank number, dtype or shape) is a ValueError or TypeError.
"""

from __future__ import annotations

__all__ = [
    "CommError",
    "CommTimeout",
    "DesyncError",
    "FrameError",
    "PeerLost",
    "RankDied",
    "RankError",
]


class CommError(RuntimeError):
    """The root of this library's errors; every instance survives pickle.

    Attributes, each None where it does not apply: ``rank`` (whose fault it is, as far as known),
    ``op`` and ``seq`` (the operation and its number), ``exitcode`` (as in multiprocessing:
    negative for a signal), ``traceback_text`` (the failing rank's traceback).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        exitcode: int | None = None,
        traceback_text: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.op = op
        self.seq = seq
        self.exitcode = exitcode
        self.traceback_text = traceback_text


class RankError(CommError):
    """A rank's function raised; the message ends with that rank's traceback."""


class RankDied(CommError):
    """A rank's process ended before its function returned."""


class PeerLost(CommError):
    """The connection to another rank closed under a message."""


class DesyncError(CommError):
    """The ranks are in different calls: another operation, shape, dtype, op, root or number."""


class FrameError(CommError):
    """What arrived is not a message of this library, or claims an impossible size."""


class CommTimeout(CommError, TimeoutError):
    """A rank or an operation did not finish in time."""
