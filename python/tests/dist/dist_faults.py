"""Workers that fail, each in its own way; rank 1 is the culprit.  NumPy and the library alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np

from tinyllm.dist import PeerLost
from tinyllm.dist.comm import Comm


def others_wait(comm: Comm) -> None:
    """The other ranks are in a collective when it happens."""
    if comm.rank != 1:
        comm.all_reduce(np.arange(10.0))
    comm.all_reduce  # noqa: B018  # rank 1 goes on to its fault


def raises(comm: Comm) -> None:
    others_wait(comm)
    raise ValueError("boom at 7")


class Stubborn(Exception):
    """Pickles, and does not unpickle: __init__ wants two arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


def raises_stubborn(comm: Comm) -> None:
    others_wait(comm)
    raise Stubborn(42, "boom")


def raises_unpicklable(comm: Comm) -> None:
    others_wait(comm)

    class Local(Exception):
        pass

    raise Local(lambda: None)


def raises_unprintable(comm: Comm) -> None:
    others_wait(comm)

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise Mute


def raises_a_novel(comm: Comm) -> None:
    others_wait(comm)
    raise ValueError("first words " + "x" * 10_000_000 + " last " + "words")


def exits(comm: Comm, code) -> None:
    others_wait(comm)
    sys.exit(code)


def is_interrupted(comm: Comm) -> None:
    others_wait(comm)
    raise KeyboardInterrupt


def dies(comm: Comm, code: int) -> None:
    others_wait(comm)
    os._exit(code)


def is_killed(comm: Comm, signum: int) -> None:
    others_wait(comm)
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    time.sleep(60)


def leaves_a_sleeper(comm: Comm, pid_file: str) -> None:
    if comm.rank == 1:
        sleeper = subprocess.Popen(["sleep", "300"])
        with open(pid_file, "w") as file:
            file.write(str(sleeper.pid))
        pid = os.fork()  # and one that holds every descriptor of its parent
        if pid == 0:
            time.sleep(300)
            os._exit(0)
    others_wait(comm)
    os._exit(5)


def loses_a_peer_and_says_something_else(comm: Comm) -> None:
    if comm.rank == 1:
        time.sleep(0.1)
        os._exit(9)
    try:
        comm.all_reduce(np.arange(10.0))
    except PeerLost as error:
        raise KeyError("gradients") from error


def hangs_up_before_it_dies(comm: Comm) -> None:
    """The others are lost, and say so, before the cause is known."""
    if comm.rank == 1:
        for link in filter(None, comm._port._links):
            link.close()
        time.sleep(0.1)
        os._exit(9)
    comm.all_reduce(np.arange(10.0))


def all_fail(comm: Comm) -> None:
    time.sleep(0.0 if comm.rank == 1 else 0.15)
    raise ValueError(f"from rank {comm.rank}")


def returns_what_does_not_pickle(comm: Comm):
    return (lambda: 1) if comm.rank == 1 else 0


class OneWay:
    """Pickles, and raises where it is unpickled."""

    def __reduce__(self):
        return _explode, ()


def _explode():
    raise ImportError("not here")


def returns_one_way(comm: Comm):
    return OneWay() if comm.rank == 1 else 0


def takes(comm: Comm, *args) -> int:
    return len(args)


def echoes(comm: Comm, x: np.ndarray) -> np.ndarray:
    return x + comm.rank


def sleeps(comm: Comm, seconds: float) -> int:
    if comm.rank == 1:
        time.sleep(seconds)
    comm.barrier()
    return comm.rank


def uses_a_broken_comm(comm: Comm) -> str:
    """Rank 0 takes a failed call for granted, and calls again."""
    if comm.rank == 1:
        comm.broadcast(np.zeros(3), 0)
        time.sleep(60)
    try:
        comm.all_reduce(np.zeros(3))
    except Exception:
        comm.barrier()
    return ""


def chatters(comm: Comm) -> int:
    for _ in range(200):
        print("x" * 10_000)
    return comm.rank


def is_stuck(comm: Comm, how: str) -> None:
    """Rank 1 gets nowhere after a collective that all have been through."""
    comm.all_reduce(np.arange(10.0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if comm.rank == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "in C":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            np.sort(np.arange(2e8)[::-1] % 1001, kind="heapsort")
        while how == "looping":
            pass
    comm.barrier()


def is_stopped_in_a_collective(comm: Comm) -> None:
    """Its place on the board says that it waits, and it never will again."""
    if comm.rank == 1:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(0.4)
            os.kill(pid, signal.SIGSTOP)
            os._exit(0)
    if comm.rank == 0:
        time.sleep(1.0)
    comm.barrier()


def spawns(comm: Comm) -> list[int]:
    from tinyllm.dist.comm import spawn

    return spawn(takes, 2, *range(comm.rank))


LOG = None


def leaves_things_to_the_end(comm: Comm, folder: str) -> int:
    """An open file, buffered output, an atexit function and a thread that is no daemon."""
    import atexit
    import threading

    global LOG
    LOG = open(f"{folder}/{comm.rank}.log", "w")  # noqa: SIM115  # that nobody closes it is the point
    LOG.write("important")
    print("printed", end="")
    atexit.register(lambda: open(f"{folder}/{comm.rank}.atexit", "w").close())

    def late() -> None:
        time.sleep(0.2)
        open(f"{folder}/{comm.rank}.thread", "w").close()

    threading.Thread(target=late).start()
    return comm.rank


def forks_and_returns_twice(comm: Comm) -> object:
    if comm.rank == 1 and os.fork() == 0:
        return "the child of 1"
    comm.barrier()
    time.sleep(0.2)
    comm.barrier()
    return comm.rank


def daemonises_a_helper_and_dies(comm: Comm, pid_file: str) -> None:
    if comm.rank == 1:
        if os.fork() == 0:
            os.setsid()
            with open(pid_file, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(30)
            os._exit(0)
        time.sleep(0.3)
        os._exit(5)
    comm.barrier()


class Odd(Exception):
    """Even telling of it fails."""

    @property
    def __cause__(self):
        raise RuntimeError("no cause")


def raises_odd(comm: Comm) -> None:
    others_wait(comm)
    raise Odd


def raises_ours_with_a_lock(comm: Comm) -> None:
    import threading

    from tinyllm.dist import CommError

    others_wait(comm)
    error = CommError("planned")
    error.lock = threading.Lock()
    raise error


def nests_a_failure(comm: Comm) -> None:
    from tinyllm.dist.comm import spawn

    if comm.rank == 2:
        spawn(dies, 2, 6)
    comm.barrier()


def groups_its_errors(comm: Comm) -> None:
    if comm.rank == 1:
        for link in filter(None, comm._port._links):
            link.close()
        time.sleep(0.1)
        os._exit(9)
    try:
        comm.all_reduce(np.arange(10.0))
    except PeerLost as error:
        raise ExceptionGroup("several", [error, ValueError("another")]) from None


def draws(comm: Comm) -> float:
    return float(np.random.rand())


def outstays(comm: Comm) -> int:
    import threading

    if comm.rank == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()
    return comm.rank


def environment(comm: Comm) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
