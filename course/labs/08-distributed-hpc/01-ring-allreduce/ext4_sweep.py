"""Bandwidth-optimality: what one rank sends in an all-reduce, in worlds of 2, 4, 8 and 16.

    python3 ext4_sweep.py --plot ext4_sweep.png

The ring's volume stays below 2 V however many ranks there are; that of the naive way, by which
every rank gathers all vectors and adds them up, grows with each rank.  Every figure is counted
while the bytes are sent; only the dashed lines in the picture are formulas.
"""

import argparse

import numpy as np
import tools

try:
    from tinyllm.dist import algorithms, spawn
except ModuleNotFoundError:
    tools.missing("the library of this repository", "pip install . where its pyproject.toml stands")

WAYS = ("ring", "naive")


def count(comm, size):
    """Bytes that this rank sends in each of the WAYS; the sums are checked on the spot."""
    x = np.arange(size) + 1000.0 * comm.rank
    expected = comm.world * np.arange(size) + 1000.0 * sum(range(comm.world))
    sent = {}
    for way in WAYS:
        before = comm.bytes_sent
        total = algorithms.all_reduce(comm, x, algorithm=way)
        sent[way] = comm.bytes_sent - before
        if not np.array_equal(total, expected):  # whole numbers: exact in any order
            raise ArithmeticError(f"{way}: rank {comm.rank} has a wrong sum")
    return sent


def sweep(worlds, size):
    """For each world, by way: the bytes that each rank sent."""
    rows = {}
    for world in worlds:
        tools.progress(f"world {world} ...")
        ranks = spawn(count, world, size, method="forkserver")
        rows[world] = {way: [sent[way] for sent in ranks] for way in WAYS}
    tools.progress()
    return rows


def show(rows, size):
    """The table; the busiest rank counts, since all wait for it."""
    vector = 8 * size
    print(f"bytes sent per rank in one all-reduce: vector={size:,} doubles, V={vector:,} bytes\n")
    print(f"{'world':>5}  {'ring':>12} {'in V':>7}  {'naive':>12} {'in V':>7}  {'naive/ring':>10}")
    for world, sent in rows.items():
        ring, naive = max(sent["ring"]), max(sent["naive"])
        print(
            f"{world:>5}  {ring:>12,} {ring / vector:>7.3f}  {naive:>12,} {naive / vector:>7.3f}"
            f"  {naive / ring:>9.2f}x"
        )
    if any(min(sent["ring"]) < max(sent["ring"]) for sent in rows.values()):
        print("\n(the busiest rank: where the world does not divide the size, ranks differ)")


def draw(rows, size):
    """Points are counted, dashed lines are the formulas."""

    def on(axes):
        worlds = np.array(sorted(rows))
        n = np.linspace(worlds[0], worlds[-1], 100)
        for way, colour, formula, law in (
            ("naive", "tab:red", "(N - 1) V", n - 1),
            ("ring", "tab:blue", "2 (N - 1)/N V", 2 * (n - 1) / n),
        ):
            counted = [max(rows[world][way]) / (8 * size) for world in worlds]
            axes.plot(n, law, "--", color=colour, linewidth=1, label=formula)
            axes.plot(worlds, counted, "o", color=colour, label=f"{way}, counted")
        axes.axhline(2, color="grey", linewidth=0.8)
        axes.text(worlds[-1], 2.15, "2 V", color="grey", ha="right")
        axes.set(xlabel="world N", ylabel="bytes sent per rank, in V")
        axes.set(xticks=worlds, ylim=(0, None))
        axes.legend(frameon=False)

    return on


def main():
    """Count, print, draw."""
    parser = argparse.ArgumentParser(description="Bytes per rank: ring against naive all-reduce.")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8, 16], metavar="N")
    parser.add_argument("--size", type=int, default=80_000, help="doubles per rank (80000)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the table")
    args = parser.parse_args()
    tools.at_least(parser, args, world=2, size=1)
    tools.needs_matplotlib(args.plot)
    rows = sweep(sorted(set(args.world)), args.size)
    show(rows, args.size)
    if args.plot:
        tools.picture(args.plot, draw(rows, args.size))
    return 0


if __name__ == "__main__":
    tools.run(main)
