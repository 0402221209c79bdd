"""A rank fails amid an all-reduce over TCP: what do the others notice, and whom do they blame?

    python3 ext3_failure.py --rank 2 --how exit      it exits: its sockets close
    python3 ext3_failure.py --rank 2 --how silent    it is stopped (SIGSTOP): they stay open

spawn() would end the survivors as soon as the rank has failed.  Here they are to speak for
themselves, so this program starts its ranks on its own.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import tools

try:
    from tinyllm.dist import CommError, CommTimeout, tcp_mesh
    from tinyllm.dist.board import Board
    from tinyllm.dist.child import leave_with_parent
except ModuleNotFoundError:
    tools.missing("the library of this repository", "pip install . where its pyproject.toml stands")

CALL = 3  # the all-reduce in which it happens
EXITCODE = 3  # of the rank that exits
NAMED, UNNAMED = 0, 1  # exit codes of survivors
STARTING = 60  # seconds that ranks may take to start and to meet


def rank_main(end, board, met, options):
    """One rank: all-reduce until something goes wrong, then say what, and exit."""
    leave_with_parent()  # Ctrl-C is for the parent, and if that dies, so do the ranks
    comm = end.open(board)
    comm.all_reduce(0.0)
    met.wait()
    comm.timeout = options.timeout
    x = np.full(100_000, comm.rank + 1.0)
    for call in range(2, CALL + 1):
        if call == CALL and comm.rank == options.rank:
            fail_within(comm, options.how)
        start = time.monotonic()
        try:
            comm.all_reduce(x)
        except CommError as error:
            waited = time.monotonic() - start
            kind = type(error).__name__
            why = str(error).partition("\n")[0]
            print(f"rank {comm.rank}, {waited:.1f} s: rank {error.rank} [{kind}] {why}", flush=True)
            sys.exit(NAMED if error.rank == options.rank else UNNAMED)


def fail_within(comm, how):
    """Let this rank fail in a step of its next all-reduce: the second one, or the first."""
    exchange, steps = comm._exchange, 0

    def step(*chunks, **options):
        nonlocal steps
        steps += 1
        if how == "exit" and steps == 2:
            print(f"rank {comm.rank}: sys.exit({EXITCODE})", flush=True)
            sys.exit(EXITCODE)
        if how == "silent":
            print(f"rank {comm.rank}: SIGSTOP", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return exchange(*chunks, **options)

    comm._exchange = step


def watch(board, processes, survivors, options):
    """Wait for the survivors; halfway to their timeout, show what they are waiting for."""
    start = time.monotonic()
    shown = options.how == "exit"  # then there is nothing to wait for
    while any(processes[rank].is_alive() for rank in survivors):
        waited = time.monotonic() - start
        if waited > options.timeout + 10:
            raise CommTimeout("the survivors do not end")
        if not shown and waited > options.timeout / 2:
            shown = True
            print(f"\n{waited:.1f} s later, every connection is open and nobody moves:")
            for entry in board.read():
                print(f"  {entry}")
            print(f"without a timeout, they would wait forever; theirs is {options.timeout:g} s\n")
            sys.stdout.flush()
        time.sleep(0.02)


def run(options):
    """Start the ranks, watch them, end them; return the exit codes of the survivors."""
    context = multiprocessing.get_context("spawn")
    board, met = Board(options.world), context.Barrier(options.world + 1)
    processes = []
    try:
        for end in tcp_mesh(options.world, timeout=STARTING):
            processes.append(context.Process(target=rank_main, args=(end, board, met, options)))
            processes[-1].start()
            end.close()  # the rank has it now
        tools.progress("ranks are starting ...")
        met.wait(STARTING)
        tools.progress()
        survivors = [rank for rank in range(options.world) if rank != options.rank]
        watch(board, processes, survivors, options)
        return [processes[rank].exitcode for rank in survivors]
    finally:
        for process in processes:
            process.kill()  # the stopped one, too
        for process in processes:
            process.join()
        board.close()


def main():
    """Return 0 if every survivor blamed the right rank."""
    parser = argparse.ArgumentParser(description="One rank fails; what do the others say?")
    parser.add_argument("--world", type=int, default=4, help="ranks (4)")
    parser.add_argument("--rank", type=int, default=2, help="the one that fails (2)")
    parser.add_argument("--how", choices=["exit", "silent"], default="exit")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for a peer (2)")
    options = parser.parse_args()
    tools.at_least(parser, options, world=2, rank=0, timeout=0.2)
    if options.rank >= options.world:
        parser.error(f"--rank must be below --world {options.world}, got {options.rank}")
    codes = run(options)
    right = codes.count(NAMED)
    print(f"\n{right} of {len(codes)} survivors named rank {options.rank}")
    return 0 if right == len(codes) else 1


if __name__ == "__main__":
    tools.run(main)
