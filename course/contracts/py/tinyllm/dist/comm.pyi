"""The contract of `tinyllm.dist.comm`: collectives over processes, module L11.2.

Words used below. `world` is the number of processes, `rank` is one process's number in
0 .. world - 1. Its right neighbour is (rank + 1) % world, its left one (rank - 1) % world. `n`
is the number of entries of an array, and "flat" means one-dimensional, in C order. Chunk j of a
flat array is the slice that `chunk_bounds(n, world)[j]` names; rank j owns it.

Four rules hold for the whole of `Comm`:

* Every result is a fresh, writable array. Arguments are never changed and never kept.
* Every rank calls the same collectives in the same order, each with the same shape, dtype, `op`
  and `src` (`all_gather` alone takes arrays of different sizes).
* In each step of a ring, even ranks send and then receive; odd ranks receive and then send. A
  ring of ranks that all send first stops for good once a message outgrows the pipe's buffer.
* float64 is the dtype that the collectives promise; `send` and `recv` keep every numeric dtype.
"""

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

from numpy.typing import ArrayLike, NDArray

_T = TypeVar("_T")

def chunk_bounds(n: int, world: int) -> list[tuple[int, int]]:
    """Cut n entries into `world` contiguous chunks and return each one's (start, stop).

    The sizes are those of numpy.array_split: the first n % world chunks are one entry larger
    than the others. With n < world the last chunks are empty.

    Raises ValueError if n < 0 or world < 1.
    """

class Comm:
    """One rank's view of the run: its number, a channel to each other rank, a byte counter.

    `bytes_sent` starts at 0 and grows by exactly the payload bytes (entries times bytes per
    entry) that this rank sends in `send`, `reduce_scatter`, `all_gather`, `all_reduce` and
    `broadcast`. Whatever travels besides the entries (shape, dtype, a barrier) is not payload.
    """

    rank: int
    world: int
    bytes_sent: int

    def send(self, x: ArrayLike, dst: int) -> None:
        """Send a copy of x, of any shape and numeric dtype, to rank `dst`.

        Messages from one rank to another arrive in the order in which they were sent. The call
        may block until `dst` receives. Bytes sent: n times the bytes per entry.

        Raises ValueError if `dst` is not a rank, or is this one; nothing is sent then.
        """

    def recv(self, src: int) -> NDArray[Any]:
        """Wait for the next array from rank `src`; return it with the shape and dtype it had.

        Raises ValueError if `src` is not a rank, or is this one.
        """

    def reduce_scatter(self, x: ArrayLike) -> NDArray[Any]:
        """Add up every rank's x, entry by entry; return chunk `rank` of the sum, flat.

        In step s this rank sends chunk (rank - s - 1) % world to the right, receives chunk
        (rank - s - 2) % world from the left, and adds its own part to it. Chunk j is therefore
        summed in ring order: rank j + 1 first, rank j last.

        Steps: world - 1. Bytes sent: every chunk once, except the one that this rank owns; that
        is (world - 1) / world of x where world divides n.
        Source: Patarasuk and Yuan (2009).
        """

    def all_gather(self, x: ArrayLike) -> NDArray[Any]:
        """Join every rank's x, flattened, in rank order; all ranks get the same flat array.

        The ranks' arrays may differ in size, and may be empty. In step s this rank sends chunk
        (rank - s) % world to the right and receives chunk (rank - s - 1) % world from the left.

        Steps: world - 1. Bytes sent: every rank's array once, except that of the right
        neighbour; that is (world - 1) / world of the result where all sizes are equal.
        Source: Patarasuk and Yuan (2009).
        """

    def all_reduce(self, x: ArrayLike, op: str = "sum") -> NDArray[Any]:
        """Combine every rank's x, entry by entry; every rank gets all of it, in x's shape.

        `op` is "sum", or "mean" for the sum divided by `world`. This is `reduce_scatter`
        followed by `all_gather`. The sum equals numpy's to rounding (ring order is another
        order), and all ranks hold the same bits.

        Steps: 2 * (world - 1). Bytes sent: 2 * (world - 1) / world of x where world divides n.
        Source: Patarasuk and Yuan (2009).

        Raises ValueError for any other `op`; nothing is sent then.
        """

    def broadcast(self, x: ArrayLike, src: int) -> NDArray[Any]:
        """Hand rank `src`'s x around the ring to the right; every rank gets a copy of it.

        Only `src` reads x. The other ranks pass an array of the same shape and dtype, whose
        entries do not matter. The rank to the left of `src` does not pass x on: `src` has it.

        Steps: world - 1, one after the other. Bytes sent: all of x, and 0 on the rank to the
        left of `src`.

        Raises ValueError if `src` is not a rank.
        """

    def barrier(self) -> None:
        """Wait until every rank has called `barrier`. Bytes sent: 0."""

def spawn(
    fn: Callable[Concatenate[Comm, ...], _T], world: int, *args: Any, timeout: float = 60.0
) -> list[_T]:
    """Run fn(comm, *args) in `world` new processes; return their results, in rank order.

    The processes come from multiprocessing's "spawn" method: each is a fresh interpreter, which
    imports `fn` by name. So `fn` stands at the top level of a module, and the arguments and
    results are things that pickle. A full-duplex pipe joins every pair of ranks. `timeout` is in
    seconds and covers everything from the start to the last result.

    The first failure ends the run: the other ranks are ended before `spawn` raises.

    Raises ValueError if world < 1. Raises RuntimeError (or a subclass) if a rank raises,
    whatever it raises: the message holds the rank's number and the text of its traceback.
    Raises RuntimeError as well if a rank ends without any report. Raises TimeoutError if the
    ranks have not finished in time.
    """
