"""Ring against tree, and three more, from 1 KB to 30 MB: which is faster, and where do they cross?

    python3 ext1_tree.py --world 8 --plot ext1_tree.png

A tree takes 2 log2 N steps with whole vectors, a ring 2 (N - 1) steps with N-ths of one.  So the
tree should win where a step costs most, and the ring where a byte does.  A ping-pong of two ranks
in the same run gives both prices, α for a message and β for a byte; from these two numbers alone
the model predicts the crossover, which is then measured.
"""

import argparse
import time

import numpy as np
import tools

try:
    from tinyllm.dist import algorithms, cores, spawn
except ModuleNotFoundError:
    tools.missing("the library of this repository", "pip install . where its pyproject.toml stands")

SIZES = [
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
    300_000,
    10**6,
    3 * 10**6,
    10**7,
    3 * 10**7,
]  # bytes
NAMES = ["ring", *reversed(algorithms.ALGORITHMS)]
MOST = 40  # calls that are timed together, so that small ones can be timed at all


def ping_pong(comm, sizes, rounds):
    """Seconds that one message takes from rank 0 to rank 1, by size; the others rest."""
    seconds = {}
    for size in sizes:
        x, turns = np.zeros(size // 8), []
        repeat = max(1, min(MOST, 10**6 // size))
        comm.barrier()
        for _ in range(rounds if comm.rank < 2 else 0):
            start = time.perf_counter()
            for _ in range(repeat):
                if comm.rank == 0:
                    comm.send(x, 1)
                    comm.recv(1)
                else:
                    comm.send(comm.recv(0), 0)
            turns.append((time.perf_counter() - start) / repeat / 2)
        if turns:
            seconds[size] = min(turns)
    return seconds


def measure(comm, sizes, rounds):
    """The ping-pong, and seconds per all-reduce by size, algorithm and round; they take turns."""
    seconds = {size: {name: [] for name in NAMES} for size in sizes}
    messages = ping_pong(comm, sizes, rounds)
    for size in sizes:
        x = np.arange(size // 8) + 100.0 * comm.rank
        expected = np.arange(size // 8) * comm.world + 100.0 * sum(range(comm.world))
        out, repeat = np.empty(size // 8), max(1, min(MOST, 10**6 // size))
        for turn in range(rounds):
            if comm.rank == 0:
                tools.progress(f"{size:,} bytes, round {turn + 1} of {rounds} ...")
            for name in NAMES[turn % len(NAMES) :] + NAMES[: turn % len(NAMES)]:
                out[:] = 0
                comm.barrier()
                start = time.perf_counter()
                for _ in range(repeat):
                    algorithms.all_reduce(comm, x, algorithm=name, out=out)
                seconds[size][name].append((time.perf_counter() - start) / repeat)
                if not np.array_equal(out, expected):
                    raise ArithmeticError(f"{name}: rank {comm.rank} has a wrong sum")
    if comm.rank == 0:
        tools.progress()
    return messages, seconds


def best(ranks, sizes):
    """Seconds by algorithm, one for each size: that of the slowest rank, in the best round."""
    times = {name: np.empty(len(sizes)) for name in NAMES}
    for i, size in enumerate(sizes):
        for name in NAMES:
            rounds = zip(*(rank[size][name] for rank in ranks), strict=True)
            times[name][i] = min(map(max, rounds))
    return times


# -- the model -------------------------------------------------------------------------------------


def fit(messages):
    """α in seconds and β in seconds per byte, with the least relative error over the ping-pong."""
    sizes, seconds = (np.array(column, float) for column in zip(*messages.items(), strict=True))
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(rows, np.ones_like(sizes), rcond=None)[0]
    return max(alpha, 1e-9), max(beta, 1e-15)


def model(name, world, n, alpha, beta):
    """Predicted seconds for n bytes: α for each step, β for each byte that passes a rank in it.

    As if every rank had a core and a wire of its own, which is what makes the model so simple.
    """
    if name == "ring":
        return 2 * (world - 1) * (alpha + beta * n / world)
    return 2 * (world - 1).bit_length() * (alpha + beta * n)


def crossover(sizes, ring, tree):
    """Bytes from which on the ring stays the faster one, between two sizes by logarithms."""
    lead = np.log(np.array(ring) / np.array(tree))  # above 0: the tree leads
    ahead = np.flatnonzero(lead > 0)
    if not len(ahead) or ahead[-1] == len(sizes) - 1:
        return None
    i = ahead[-1]
    part = lead[i] / (lead[i] - lead[i + 1])
    return float(sizes[i] * (sizes[i + 1] / sizes[i]) ** part)


# -- what is shown ---------------------------------------------------------------------------------


def show(world, sizes, times):
    """The table; an asterisk is at the fastest of a row."""
    print(f"one all-reduce in ms: world={world} on {cores()} cores, * the fastest way\n")
    print(f"{'bytes':>11}" + "".join(f" {name.replace('_', ' '):>19}" for name in NAMES))
    for i, size in enumerate(sizes):
        row = {name: times[name][i] for name in NAMES}
        fastest = min(row, key=row.get)
        cells = [f"{1e3 * t:.3f}{'*' if name == fastest else ' '}" for name, t in row.items()]
        print(f"{size:>11,}" + "".join(f" {cell:>19}" for cell in cells))


def named(where, times):
    """A crossover in words."""
    if where:
        return f"{where:,.0f} bytes"
    return (
        "none: the ring is faster throughout" if times[0][-1] <= times[1][-1] else "none: the tree"
    )


def draw(sizes, times, predicted, crossings):
    """Time against size, both by powers of ten; dashed is the model."""

    def on(axes):
        for name in NAMES:
            strong = name in predicted
            axes.loglog(sizes, 1e3 * times[name], "o-" if strong else ".-", markersize=4,
                        linewidth=1.6 if strong else 0.8, alpha=1 if strong else 0.6,
                        label=name.replace("_", " "))  # fmt: skip
        for name, (grid, seconds) in predicted.items():
            axes.loglog(grid, 1e3 * seconds, "--", color=f"C{NAMES.index(name)}", linewidth=1,
                        label=f"{name}, model")  # fmt: skip
        for words, where, style in crossings:
            if where:
                axes.axvline(where, color="grey", linewidth=1, linestyle=style)
                axes.annotate(words, (where, axes.get_ylim()[0]), (-3, 4), rotation=90,
                              textcoords="offset points", fontsize=8, color="grey",
                              ha="right", va="bottom")  # fmt: skip
        axes.set(xlabel="bytes of one vector", ylabel="ms of one all-reduce")
        axes.legend(frameon=False, fontsize=8)

    return on


def main():
    """Measure, fit, predict, print, draw."""
    parser = argparse.ArgumentParser(description="Ring against tree, from 1 KB to 30 MB.")
    parser.add_argument("--world", type=int, default=8, help="ranks (8)")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, help="of measuring (7)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves")
    args = parser.parse_args()
    tools.at_least(parser, args, world=2, bytes=8, rounds=1)
    tools.needs_matplotlib(args.plot)
    sizes = sorted({size // 8 * 8 for size in args.bytes})
    ranks = spawn(measure, args.world, sizes, args.rounds, timeout=None, method="forkserver")
    times = best([seconds for _, seconds in ranks], sizes)
    alpha, beta = fit(ranks[0][0])
    show(args.world, sizes, times)

    grid = np.geomspace(min(sizes[0], 1_000), max(sizes[-1], 10**9), 600)
    predicted = {n: model(n, args.world, grid, alpha, beta) for n in ("ring", "tree")}
    measured = [times[name] for name in predicted]
    crossings = [
        ("measured", crossover(sizes, *measured), "-"),
        ("predicted", crossover(grid, *predicted.values()), "--"),
    ]
    print(f"\none message: α = {1e6 * alpha:.1f} µs, β = {1e9 * beta:.3f} ns per byte")
    for (words, where, _), curves in zip(crossings, (measured, [*predicted.values()]), strict=True):
        print(f"crossover of ring and tree, {words + ':':<10} {named(where, curves)}")
    if args.plot:
        inside = grid <= sizes[-1]
        lines = {name: (grid[inside], curve[inside]) for name, curve in predicted.items()}
        tools.picture(args.plot, draw(sizes, times, lines, crossings))
    return 0


if __name__ == "__main__":
    tools.run(main)
