"""All-reduce by other roads than the ring, over any Comm: they need nothing but send and recv.

    naive               every rank's array to every rank, then each adds them all up
    tree                partial sums climb a tree to rank 0, the sum comes down again
    recursive_doubling  pairs swap their sums, at distance 1, 2, 4, ...: all are done at once
    halving_doubling    pairs swap halves of what they have in common, then the finished pieces
    ring                the Comm's own all_reduce
    auto                one of these, by a fixed table of world and size

Each has p ranks and an array of n bytes.  A step is what a rank does with one partner: send,
receive, or both.  Sums are taken in a fixed order, not in numpy.sum's, and every rank ends with
the same bits.  The two that pair ranks need a power of two of them; ``_folded`` takes care of the
rest.  Source of all: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np
from numpy.typing import ArrayLike

from tinyllm.dist import arrays
from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm, chunk_bounds
from tinyllm.dist.errors import DesyncError

OPS = ("sum", "mean")


def all_reduce(
    comm: Comm,
    x: ArrayLike,
    op: str = "sum",
    algorithm: str = "tree",
    *,
    out: Array | None = None,
) -> Array:
    """Return the sum or mean of all ranks' ``x``, in x's shape and dtype, as Comm.all_reduce does.

    All ranks name the same ``algorithm`` and ``op`` and bring as many entries, of the same dtype:
    where a message shows that they did not, DesyncError.  ``out`` may be ``x`` itself.  ValueError
    for an unknown algorithm or op, TypeError for the mean of integers; nothing is sent then.
    """
    _check_known(comm, "op", op, OPS)
    _check_known(comm, "algorithm", algorithm, (*ALGORITHMS, "ring", "auto"))
    x = arrays.reducible(x, "all_reduce", op)
    if algorithm == "auto":
        algorithm = choice(comm.world, x.nbytes)
    if algorithm == "ring":  # the contract's all_reduce has no out
        return comm.all_reduce(x, op) if out is None else comm.all_reduce(x, op, out=out)
    result = arrays.result("all_reduce", x.shape, x.dtype, out)
    if halves := op == "mean" and x.dtype == np.float16:  # whose sum may well be infinite
        np.divide(x, comm.world, out=result)
    else:
        np.copyto(result, x)
    total = result.reshape(-1)
    ALGORITHMS[algorithm](_Call(comm, algorithm, op), total)
    if op == "mean" and not halves:
        total /= comm.world
    return arrays.delivered(result, out)


# "auto" is the ring, but for arrays of so many bytes in a world of at least so many ranks, as
# measured: course/docs/algorithms.md.  Nothing that ranks may see differently enters.
AUTO = ((6, 64, 512 << 10, "tree"),)  # world, bytes from, to, algorithm


def choice(world: int, nbytes: int) -> str:
    """What "auto" stands for in a world of that size, for arrays of ``nbytes``."""
    for ranks, least, most, algorithm in AUTO:
        if world >= ranks:
            return algorithm if least <= nbytes <= most else "ring"
    return "ring"


class _Call:
    """One rank's part in one call: the Comm's send and recv, all messages marked and checked.

    A Comm numbers its collectives, but to it our messages are any messages: by itself it would
    take the half sum of one algorithm for the whole sum of another.  So each carries a mark of
    algorithm and op where it costs nothing, in its shape: so many dimensions of length 1.
    """

    def __init__(self, comm: Comm, algorithm: str, op: str) -> None:
        self.rank = comm.rank
        self.world = comm.world
        self._comm = comm
        self._me = f"{algorithm}, {op}"
        self._mark = (1,) * (1 + _CALLS.index(self._me))

    def send(self, x: Array, dst: int) -> None:
        """Send the flat array ``x``: x.nbytes bytes."""
        self._comm.send(x.reshape(self._mark + x.shape), dst)

    def recv(self, src: int, like: Array) -> Array:
        """Receive a flat array of ``like``'s size and dtype, and of this call."""
        got = self._comm.recv(src)
        if got.shape != self._mark + like.shape or got.dtype != like.dtype:
            raise DesyncError(
                f"rank {self.rank} is in all_reduce ({self._me}) and expects {like.dtype}"
                f"[{like.size}] from rank {src}, but that sent {self._described(got)}: all ranks"
                " must name the same algorithm and op, and bring the same size and dtype",
                op="all_reduce",
            )
        return got.reshape(-1)

    def exchange(self, outgoing: Array, partner: int, like: Array) -> Array:
        """Swap arrays with ``partner``, who does the same; return what it sent.

        The higher rank sends first.  If both did, each would wait for the other to receive, as soon
        as a message outgrows what the channel between them holds.  In every algorithm the first
        message of a pair goes down: whoever is in another one gets it, and sees its mark.
        """
        if self.rank > partner:
            self.send(outgoing, partner)
            return self.recv(partner, like)
        incoming = self.recv(partner, like)
        self.send(outgoing, partner)
        return incoming

    def _described(self, got: Array) -> str:
        mark = got.ndim - 2
        if 0 <= mark < len(_CALLS) and got.shape[:-1] == (1,) * (got.ndim - 1):
            return f"{got.dtype}[{got.size}] of ({_CALLS[mark]})"
        return f"{got.dtype}{list(got.shape)}"


def _check_known(comm: Comm, what: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"rank {comm.rank}: all_reduce: {what}={str(value)[:40]!r}; it is one of"
            f" {', '.join(map(repr, known))}"
        )


# -- the algorithms: each makes the flat array ``total``, this rank's own at first, the sum --------


def naive(call: _Call, total: Array) -> None:
    """Send every rank's array to every rank, then add up: an all-gather and a sum.

        0 <--> 1 <--> 2 <--> 0       all pairs, in one order for all: (0, 1), (0, 2), (1, 2)

    p - 1 steps on each rank, 2p - 3 of them one after the other; every rank sends (p - 1) · n.
    All ranks add the same arrays in the same order, that of the ranks: the same bits.
    """
    mine = total.copy()
    for peer in range(call.world):
        part = mine if peer == call.rank else call.exchange(mine, peer, like=mine)
        if peer == 0:
            total[:] = part
        else:
            total += part


def tree(call: _Call, total: Array) -> None:
    """Reduce up a binomial tree to rank 0, broadcast down it.

        0 <--- 1   2 <--- 3   4 <--- 5   6 <--- 7       distance 1
        0 <------- 2          4 <------- 6              distance 2
        0 <------------------ 4                         distance 4, and back in reverse

    2 ceil(log2 p) steps.  A rank sends n up, but for rank 0, and n down to each of its children:
    at most ceil(log2 p) · n (rank 0), together 2 (p - 1) · n.  Only rank 0 holds the sum before it
    is copied: the same bits.
    """
    children = []
    distance = 1
    while distance < call.world and not call.rank & distance:
        if call.rank + distance < call.world:
            children.append(call.rank + distance)
            total += call.recv(children[-1], like=total)
        distance *= 2
    if call.rank:
        parent = call.rank - distance
        call.send(total, parent)
        total[:] = call.recv(parent, like=total)
    for child in reversed(children):  # the largest subtree first: it has the longest way to go
        call.send(total, child)


def _folded(among: Callable[[_Call, Array, int], None]) -> Callable[[_Call, Array], None]:
    """Let the first ``core`` ranks do ``among``: as many as the largest power of two that there is.

        0 <--- 4   1 <--- 5   2   3       p = 6, core = 4: the others hand in their arrays first
        0 <--> 1 <--> 2 <--> 3            and fetch the sum in the end

    Where p is no power of two: 2 steps more, and n bytes more from each rank that has another
    folded into it; a folded rank sends n.  The sum it fetches is a copy: the same bits.  (MPICH
    folds the even ones of the first ranks into their right neighbours; the cost is the same.)
    """

    @wraps(among)
    def on_all(call: _Call, total: Array) -> None:
        core = 1 << (call.world.bit_length() - 1)
        host, guest = call.rank - core, call.rank + core
        if host >= 0:
            call.send(total, host)
            total[:] = call.recv(host, like=total)
            return
        if guest < call.world:
            total += call.recv(guest, like=total)
        among(call, total, core)
        if guest < call.world:
            call.send(total, guest)

    return on_all


@_folded
def recursive_doubling(call: _Call, total: Array, core: int) -> None:
    """Swap sums with the rank at distance 1, 2, 4, ...: each time twice as many share one sum.

        0 <--> 1   2 <--> 3        distance 1: {0, 1} and {2, 3}
        0 <------> 2               distance 2: all four
            1 <------> 3

    log2 p steps, every rank sends log2 p · n; see ``_folded`` where p is no power of two.  Every
    sum is computed on both sides, so both compute it in the same way, "sum of the lower ranks +=
    sum of the upper": by induction all hold the same bits.  Addition commutes, but for two NaNs,
    of which the first survives; and NumPy adds single entries in place by a loop of its own.
    """
    distance = 1
    while distance < core:
        partner = call.rank ^ distance
        theirs = call.exchange(total, partner, like=total)
        if call.rank < partner:
            total += theirs
        else:
            theirs += total
            total[:] = theirs
        distance *= 2


@_folded
def halving_doubling(call: _Call, total: Array, core: int) -> None:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner).

        chunks of rank 0    # # # #     distance 2: it sends 2, 3 to rank 2, and gets 0, 1 to add
        of 4, that count    # # . .     distance 1: it sends 1 to rank 1, and gets 0 to add
                            # . . .     distance 1: swaps finished chunk 0 for 1 with rank 1
                            # # . .     distance 2: swaps finished chunks 0, 1 for 2, 3 with rank 2
                            # # # #

    Halfway rank r has chunk r finished.  2 log2 p steps; a rank sends all chunks but its own, then
    its own, 2, 4, ...: 2 (p - 1)/p · n where p divides the entries; see ``_folded`` where p is no
    power of two.  Each chunk is finished on one rank and then copied: the same bits.
    """
    bounds = chunk_bounds(total.size, core)

    def chunks(rank: int, distance: int) -> Array:
        """The ``distance`` chunks that ``rank`` keeps when it halves at that distance."""
        first = rank - rank % distance
        return total[bounds[first][0] : bounds[first + distance - 1][1]]

    distances = [1 << k for k in range(core.bit_length() - 1)]
    for distance in reversed(distances):
        partner = call.rank ^ distance
        mine, theirs = chunks(call.rank, distance), chunks(partner, distance)
        mine += call.exchange(theirs, partner, like=mine)
    for distance in distances:
        partner = call.rank ^ distance
        mine, theirs = chunks(call.rank, distance), chunks(partner, distance)
        theirs[:] = call.exchange(mine, partner, like=theirs)


ALGORITHMS: dict[str, Callable[[_Call, Array], None]] = {
    algorithm.__name__: algorithm
    for algorithm in (naive, tree, recursive_doubling, halving_doubling)
}
_CALLS = [f"{name}, {op}" for name in ALGORITHMS for op in OPS]
