"""Collectives that return at once, with a Future, and travel while the caller computes.

    future = nonblocking.all_reduce(comm, gradient)
    ...                                 compute something else meanwhile
    total = future.result()             what comm.all_reduce(gradient) returns

    the caller                        the Comm's communication thread
      all_reduce(comm, a)    ------>    comm.all_reduce(a)
      all_reduce(comm, b)    ------>    comm.all_reduce(b)
      comm.barrier()                                      (waits until both are done, then begins)

**Order.**  One thread per Comm makes the calls, one after the other, as they were made; a blocking
call first waits for those made before it.  So the two kinds can be mixed, if all ranks make the
same calls in the same order, as ever.  All calls on a Comm come from one thread of the caller's.

**Memory.**  Nothing is copied on the way in, as in MPI: until the future is done, ``x`` must not be
changed, and ``out=`` neither changed nor read.

**Errors** come out of the future.  What a blocking call refuses at once, say a dtype, comes out of
it as well; and since the calls queued behind a failed one counted on it, they fail, and so does
every later call on that Comm.  No future can be cancelled: the other ranks are in that call, too.

**The end.**  A rank that returns makes the calls first that are still queued.  If one failed, and
nobody has asked its future for the result or the exception, the rank fails with that error.

There is no send and no recv: in a queue, a recv would wait until the send before it has been
received, and two ranks that send to each other would wait forever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from numpy.typing import ArrayLike

from tinyllm.dist.arrays import Array
from tinyllm.dist.comm import Comm

T = TypeVar("T")


def reduce_scatter(comm: Comm, x: ArrayLike, *, out: Array | None = None) -> Future[Array]:
    """As comm.reduce_scatter, in a future."""
    return call(comm, type(comm).reduce_scatter, x, out=out)


def all_gather(comm: Comm, x: ArrayLike, *, out: Array | None = None) -> Future[Array]:
    """As comm.all_gather, in a future."""
    return call(comm, type(comm).all_gather, x, out=out)


def all_reduce(
    comm: Comm, x: ArrayLike, op: str = "sum", *, out: Array | None = None
) -> Future[Array]:
    """As comm.all_reduce, in a future."""
    return call(comm, type(comm).all_reduce, x, op, out=out)


def broadcast(
    comm: Comm, x: ArrayLike | None, src: int, *, out: Array | None = None
) -> Future[Array]:
    """As comm.broadcast, in a future."""
    return call(comm, type(comm).broadcast, x, src, out=out)


def barrier(comm: Comm) -> Future[None]:
    """As comm.barrier, in a future: done when all ranks have come to it."""
    return call(comm, type(comm).barrier)


def call(comm: Comm, fn: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
    """Let the communication thread make the call ``fn(comm, *args, **options)`` in its turn.

    ``call(comm, algorithms.all_reduce, x, "sum", "tree")`` is an all-reduce by a tree.
    """
    return _queue(comm).add(fn, args, options)


def finish(comm: Comm) -> None:
    """Return when all calls are done; raise the first failure if nobody has asked for it.

    It ends the thread, which the next call starts anew.  A rank that returns does this by itself.
    """
    _queue(comm).finish()


def _queue(comm: Comm) -> _Queue:
    """The queue that the Comm got at its first call."""
    port = comm._port
    if port.queue is None:
        port.queue = _Queue(comm)
    assert isinstance(port.queue, _Queue)
    return port.queue


class _Pending(Future[T]):
    """A call's result, some day."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where  # the call was made
        self.seen = False  # by somebody who asked for its exception
        self.set_running_or_notify_cancel()  # from now on, cancel() returns False

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.seen = True
        return error

    def result(self, timeout: float | None = None) -> T:
        self.exception(timeout)
        return super().result()


class _Queue:
    """The calls of one Comm that are not done yet, and the thread that makes them."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._calls: SimpleQueue[tuple[_Pending[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._caller = 0  # the thread that made the calls which are not done
        self._undone = 0
        self._changed = threading.Condition()
        self._at_work = False  # in a call, not in a callback of its future
        self._failed: _Pending[Any] | None = None  # the first one
        comm._port.at_end(self.finish)

    def add(self, fn: Callable[..., T], args: Any, options: Any) -> Future[T]:
        """Queue a call."""
        name = getattr(fn, "__name__", "call")
        future: _Pending[T] = _Pending(f"{name}, called without waiting at{_place()}")
        self._check_thread(name)
        if self._on_thread():
            raise RuntimeError(
                f"rank {self._comm.rank}: {name} was called on the communication thread itself,"
                " which would wait for itself"
            )
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"communication of rank {self._comm.rank}", daemon=True
            )
            self._thread.start()
        with self._changed:
            self._caller = threading.get_ident()
            self._undone += 1
        self._calls.put((future, partial(fn, self._comm, *args, **options)))
        return future

    def give_way(self, op: str) -> None:
        """A blocking ``op`` begins: return when all calls made before it are done."""
        if not self._undone:
            return
        self._check_thread(op)
        if not self._on_thread():
            with self._changed:
                self._changed.wait_for(lambda: not self._undone)

    def finish(self) -> None:
        """Make all calls, end the thread, and bring to light what nobody has looked at."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None
        if self._failed is not None and not self._failed.seen:
            self._failed.result()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._make(*item)
            del item  # it has the arrays
            with self._changed:
                self._undone -= 1
                self._changed.notify_all()

    def _make(self, future: _Pending[T], make: Callable[[], T]) -> None:
        self._at_work = True
        try:
            value = make()
        except BaseException as error:
            self._at_work = False
            error.add_note(f"in {future.where}")
            self._failed = self._failed or future
            self._comm._port.fail(error, future.where.partition(",")[0])
            future.set_exception(error)
        else:
            self._at_work = False
            future.set_result(value)

    def _on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _check_thread(self, op: str) -> None:
        """Ranks must agree on the order of calls, so it must not depend on how threads run."""
        me = f"rank {self._comm.rank}: {op} was called"
        if self._on_thread():
            if not self._at_work:
                raise RuntimeError(f"{me} from a future's callback, which runs at no certain time")
        elif self._undone and self._caller != threading.get_ident():
            raise RuntimeError(
                f"{me} while calls of another thread are queued; a Comm serves one thread at a time"
            )


def _place() -> str:
    """Where this module was called, as tracebacks write it."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    code = frame.f_code
    return f'\n  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
