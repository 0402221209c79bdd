"""Buckets of gradients are all-reduced while the backward pass goes on: how much time is hidden?

    python3 ext2_overlap.py --plot ext2_overlap.png

A backward pass yields one bucket of gradients after the other.  Their all-reduces can wait until it
is over, or each begins as soon as its bucket is there (nonblocking.all_reduce), and travels while
the next one is computed.  "sleep" stands for a pass on an accelerator, which leaves the processor
free; "matmul" computes with NumPy on the same cores that move the bytes.
"""

import argparse
import time

import numpy as np
import tools

try:
    from tinyllm.dist import cores, nonblocking, spawn
except ModuleNotFoundError:
    tools.missing("the library of this repository", "pip install . where its pyproject.toml stands")

WIDTH = 64  # characters of the timeline


class Pass:
    """A simulated backward pass with its buckets, on one rank; events are (start, end) times."""

    def __init__(self, comm, args):
        self.comm = comm
        self.seconds = args.backward / 1e3 / args.buckets  # for each bucket
        entries = args.size // 8
        self.grads = [np.arange(entries) + b + 10.0 * comm.rank for b in range(args.buckets)]
        self.sums = [np.empty(entries) for _ in self.grads]
        self.matrix, self.times = np.full((384, 384), 1e-3), 0
        if args.backward_by == "matmul":
            self.times = self._calibrated()

    def _calibrated(self):
        """Products that take so long when all ranks make them and nothing travels."""
        self.comm.barrier()
        start, made = time.perf_counter(), 0
        while time.perf_counter() - start < max(self.seconds, 0.05):
            self.matrix @ self.matrix
            made += 1
        mine = made * self.seconds / (time.perf_counter() - start)
        return max(1, round(float(self.comm.all_reduce(mine, "mean"))))

    def backward(self, bucket):
        """Compute one bucket."""
        start = time.perf_counter()
        if self.times:
            for _ in range(self.times):
                self.matrix @ self.matrix
        else:
            time.sleep(self.seconds)
        self.computed.append((start, time.perf_counter()))

    def reduce(self, comm, bucket):
        """All-reduce one bucket."""
        start = time.perf_counter()
        comm.all_reduce(self.grads[bucket], out=self.sums[bucket])
        self.travelled.append((start, time.perf_counter()))

    def backward_alone(self):
        """Compute all buckets."""
        for bucket in range(len(self.grads)):
            self.backward(bucket)

    def reduce_alone(self):
        """All-reduce all buckets."""
        for bucket in range(len(self.grads)):
            self.reduce(self.comm, bucket)

    def one_after_the_other(self):
        """Wait with the all-reduces until the pass is over."""
        self.backward_alone()
        self.reduce_alone()

    def overlapped(self):
        """Begin each as soon as its bucket is there."""
        futures = []
        for bucket in range(len(self.grads)):
            self.backward(bucket)
            futures.append(nonblocking.call(self.comm, self.reduce, bucket))
        for future in futures:
            future.result()

    def timed(self, way):
        """Seconds until all ranks are done, and this rank's events, from the common start on."""
        self.computed, self.travelled = [], []
        for total in self.sums:
            total[:] = 0
        self.comm.barrier()
        start = time.perf_counter()
        way()
        self.comm.barrier()
        seconds = time.perf_counter() - start
        if self.travelled:
            self._check()
        events = [[(a - start, b - start) for a, b in e] for e in (self.computed, self.travelled)]
        return seconds, events

    def _check(self):
        world = self.comm.world
        tens = 10.0 * sum(range(world))
        for bucket, total in enumerate(self.sums):
            if not np.array_equal(total, world * (np.arange(len(total)) + float(bucket)) + tens):
                raise ArithmeticError(f"rank {self.comm.rank}: wrong sum of bucket {bucket}")


WAYS = ("backward_alone", "reduce_alone", "one_after_the_other", "overlapped")


def measure(comm, args):
    """Time all WAYS in turn, some rounds of them; by way, [(seconds, events)]."""
    one_pass = Pass(comm, args)
    runs = {way: [] for way in WAYS}
    one_pass.timed(one_pass.overlapped)  # the first one finds cold memory
    for turn in range(args.rounds):
        if comm.rank == 0:
            tools.progress(f"round {turn + 1} of {args.rounds} ...")
        for way in WAYS:
            runs[way].append(one_pass.timed(getattr(one_pass, way)))
    if comm.rank == 0:
        tools.progress()
    return runs


def show(args, runs):
    """What was measured on rank 0: each way's best round, the hidden time, and the timeline."""
    ms = {way: 1e3 * min(seconds for seconds, _ in runs[way]) for way in WAYS}
    print(
        f"backward pass ({args.backward_by}) with {args.buckets} buckets of {args.size:,} bytes:"
        f" world={args.world} on {cores()} cores, best of {args.rounds}\n"
    )
    print(f"  backward pass alone     {ms['backward_alone']:>8.1f} ms")
    print(f"  all-reduces alone       {ms['reduce_alone']:>8.1f} ms")
    print(f"  one after the other     {ms['one_after_the_other']:>8.1f} ms")
    print(f"  overlapped              {ms['overlapped']:>8.1f} ms")
    hidden = ms["one_after_the_other"] - ms["overlapped"]
    exposed = ms["one_after_the_other"] - ms["backward_alone"]
    share = f", {hidden / exposed:.0%} of what the all-reduces added" if exposed > 0 else ""
    print(f"  hidden                  {hidden:>8.1f} ms{share}\n")
    best = min(runs["overlapped"])
    for line in timeline(*best):
        print(f"  {line}")
    return best


def timeline(seconds, events):
    """A line of text for each kind of event; a digit is the bucket's number."""
    for label, spans in zip(("backward", "all-reduce"), events, strict=True):
        line = [" "] * WIDTH
        for bucket, span in enumerate(spans):
            first, last = (min(WIDTH - 1, int(WIDTH * t / seconds)) for t in span)
            line[first : last + 1] = str(bucket % 10) * (last + 1 - first)
        yield f"{label:<11}|{''.join(line)}|"
    yield f"{'':<11}0{f'{1e3 * seconds:.0f} ms':>{WIDTH}}"


def draw(seconds, events):
    """The same timeline as a picture."""

    def on(axes):
        for row, spans in enumerate(events):
            for bucket, (start, end) in enumerate(spans):
                colour = f"C{bucket % 10}"
                width = 1e3 * (end - start)
                axes.barh(row, width, left=1e3 * start, height=0.6, color=colour, edgecolor="white")
                axes.text(1e3 * start + width / 2, row, bucket, ha="center", va="center")
        axes.axvline(1e3 * events[0][-1][1], color="grey", linewidth=0.8, linestyle=":")
        axes.set(xlabel="ms (rank 0)", xlim=(0, 1e3 * seconds), yticks=[0, 1])
        axes.set_yticklabels(["backward", "all-reduce"])
        axes.invert_yaxis()

    return on


def main():
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description="Hide all-reduces behind a backward pass.")
    parser.add_argument("--world", type=int, default=2, help="ranks (2)")
    parser.add_argument("--buckets", type=int, default=8, help="of gradients (8)")
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of one (4000000)")
    parser.add_argument("--backward", type=int, default=200, help="ms of the whole pass (200)")
    parser.add_argument("--backward-by", choices=["sleep", "matmul"], default="sleep")
    parser.add_argument("--rounds", type=int, default=7, help="of measuring (7)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the timeline")
    args = parser.parse_args()
    tools.at_least(parser, args, world=1, buckets=1, size=8, backward=1, rounds=1)
    tools.needs_matplotlib(args.plot)
    best = show(args, spawn(measure, args.world, args, timeout=None, method="forkserver")[0])
    if args.plot:
        tools.picture(args.plot, draw(*best), height=1.9)
    return 0


if __name__ == "__main__":
    tools.run(main)
