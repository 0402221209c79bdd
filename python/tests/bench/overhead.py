"""What the checks cost: the header and board per message and per operation, against bare sockets.

    python python/tests/bench/overhead.py

One process, both ends of one link, 8 bytes of payload: nothing waits, only work is measured.
"""

from __future__ import annotations

import socket
import timeit

import numpy as np

from tinyllm.dist.board import Board
from tinyllm.dist.comm import Comm
from tinyllm.dist.port import Port


def microseconds(name: str, statement) -> float:
    """The least time that one call of ``statement`` took, printed."""
    times = timeit.repeat(statement, number=10_000, repeat=15)
    print(f"{name:<55} {min(times) / 10_000 * 1e6:6.2f} µs")
    return min(times) / 10_000 * 1e6


def main() -> None:
    """Print the table."""
    board = Board(2)
    ends = socket.socketpair()
    left, right = Port(0, [None, ends[0]], board), Port(1, [ends[1], None], board)
    Comm(left), Comm(right)
    x, y, z = np.ones(2), np.ones(1), np.empty(1)

    def operation() -> None:
        with left.operation("all_reduce", x, redop="sum"):
            pass

    microseconds("an operation: number, header, board", operation)
    left.operation("all_reduce", x, redop="sum")
    right.operation("all_reduce", x, redop="sum")
    right.call = left.call
    bare_left, bare_right = left._links[1]._socket, right._links[0]._socket

    def message(add=None) -> None:
        left.send(1, y)
        right.receive(0, z, add)

    def bare() -> None:
        bare_left.sendall(y)
        bare_right.recv_into(z, 8, socket.MSG_WAITALL)

    def bare_sum() -> None:
        bare()
        np.add(z, y, out=z)

    def without_a_header() -> None:
        left._links[1].send(b"", y)
        right._links[0].recv_into(8, z)

    checked = microseconds("a message, header sent and compared", message)
    linked = microseconds("the same bytes over the same links, without a header", without_a_header)
    plain = microseconds("the same bytes over bare sockets", bare)
    summed = microseconds("a message that is added", lambda: message(y))
    plain_sum = microseconds("the same over bare sockets", bare_sum)
    print(f"{'header and its check, per message':<55} {checked - linked:6.2f} µs")
    print(f"{'all that is ours, per message':<55} {checked - plain:6.2f} µs", end="")
    print(f", {summed - plain_sum:.2f} µs with the sum")


if __name__ == "__main__":
    main()
