"""all_reduce beside MPI's and gloo's, in turn and in several rounds.

    make bench-peers        makes the peers' environments, then runs this file
    python python/tests/bench/peers.py [--world 2 4] [--rounds 3] [--sizes 8:32M] [--json]

    pipe, tcp, shm   ours, over each mesh that the library has
    mpich, openmpi   mpi4py's Allreduce, which takes NumPy arrays: (x, out), and MPI.IN_PLACE
    gloo             torch.distributed.all_reduce, which is in-place; out-of-place, it copies first

Everybody is timed by the loop of `tinyllm bench` (tinyllm.bench.timing): a barrier of the peer's
own, then one call, the slowest rank's time, p50 of all calls; the input is written anew before each
and the whole result compared after it.  A run is all sizes of one peer in one world, in fresh
processes; a round has one run of each peer.  Printed are the medians over the rounds: of times, and
of the ratios within each round.  Who is not installed, or does not run, is named and left out.

What is set: with more ranks than cores Open MPI gets --oversubscribe and mpi_yield_when_idle, since
it would spin; as root it gets its OMPI_ALLOW_RUN_AS_ROOT.  gloo's ranks get OMP_NUM_THREADS=1, as
torchrun has it.  MPICH runs as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from tinyllm.bench import counts_of, machine, meshes, sizes
from tinyllm.bench.cases import Kind
from tinyllm.bench.table import Row, micro, table
from tinyllm.bench.timing import Log, Sample, measure_rank
from tinyllm.dist import cores, spawn
from tinyllm.progress import Bar

ROOT = Path(__file__).parents[3]
KIND = Kind("all_reduce")
FOREIGN = {"mpich": "peers-mpich", "openmpi": "peers-openmpi", "gloo": "peers-torch"}
PATIENCE = 120  # seconds for one run


# -- in the ranks ----------------------------------------------------------------------------------


class Mpi:
    """As much of a Comm as the clock and the case need, over mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._all, self._in_place, self._sum = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.SUM
        self.rank, self.world = self._all.rank, self._all.size
        self.barrier, self.send = self._all.Barrier, self._all.send

    def recv(self, src):
        return self._all.recv(source=src)

    def all_reduce(self, x, op, *, out):
        self._all.Allreduce(self._in_place if out is x else x, out, self._sum)


class Gloo:
    """The same over torch.distributed."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        import torch
        import torch.distributed

        self._torch, self._dist, self._tensors = torch, torch.distributed, {}
        self.rank, self.world = rank, world
        self._dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        self.barrier = self._dist.barrier

    def send(self, x, dst):
        self._dist.send(self._torch.from_numpy(x.reshape(1)), dst)

    def recv(self, src):
        got = np.empty(1, np.int64)
        self._dist.recv(self._torch.from_numpy(got), src)
        return got[0]

    def all_reduce(self, x, op, *, out):
        result = self._tensor(out)
        if out is not x:
            result.copy_(self._tensor(x))
        self._dist.all_reduce(result)

    def _tensor(self, x):
        """Made once for each array: a user of torch has tensors to begin with."""
        known, tensor = self._tensors.get(id(x), (None, None))
        if known is not x:
            tensor = self._torch.from_numpy(x)
            self._tensors = dict(list(self._tensors.items())[-1:]) | {id(x): (x, tensor)}
        return tensor


def run_rank(peer: str, folder: str, counts: list[int], seconds: float, *place: str) -> None:
    """Measure, and leave the logs in the folder; ours starts its ranks itself."""
    signal.alarm(PATIENCE)  # whatever becomes of mpiexec, no rank outlives it for long
    if peer in FOREIGN:
        comm = Gloo(*map(int, place), folder) if peer == "gloo" else Mpi()
        logs = {comm.rank: measure_rank(comm, KIND, counts, seconds)}
    else:
        (world,) = map(int, place)
        ranks = spawn(measure_rank, world, KIND, counts, seconds, timeout=None, mesh=meshes()[peer])
        logs = dict(enumerate(ranks))
    for rank, log in logs.items():
        Path(folder, f"{rank}.json").write_text(json.dumps([asdict(one) for one in log]))


# -- in the parent ---------------------------------------------------------------------------------


class LeftOut(Exception):
    """Why a peer cannot take part."""


@dataclass
class Plan:
    """What every run is to measure."""

    counts: list[int]
    seconds: float
    environments: Path


def commands(peer: str, world: int, plan: Plan, folder: str) -> list[list[str]]:
    """What to start for one run: mpiexec, or the ranks one by one."""
    bin_ = plan.environments / FOREIGN[peer] / "bin" if peer in FOREIGN else None
    script = [__file__, "--rank", peer, folder, json.dumps(plan.counts), str(plan.seconds)]
    if bin_ is None:
        return [[sys.executable, *script, str(world)]]
    python = str(bin_ / "python")
    if not os.path.exists(python):
        raise LeftOut(f"{python} is not there; make bench-peers installs it")
    if peer == "gloo":
        return [[python, *script, str(rank), str(world)] for rank in range(world)]
    more = ["--oversubscribe"] if peer == "openmpi" and world > cores() else []
    start = [str(bin_ / "mpiexec"), *more, "-n", str(world)]
    return [[*start, python, "-m", "mpi4py", *script]]  # -m mpi4py: one rank that raises ends all


def environment(peer: str, world: int) -> dict[str, str]:
    """The environment of a run: ours, the sources of tinyllm, and what a peer asks for."""
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    changed = {"PYTHONPATH": path}
    if peer == "openmpi":
        if os.geteuid() == 0:
            changed |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if world > cores():
            changed |= {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if peer == "gloo":
        changed |= {"OMP_NUM_THREADS": "1"}
    return os.environ | changed


def run(peer: str, world: int, plan: Plan) -> list[Row]:
    """One run, in processes of its own; LeftOut if it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
        errors = Path(folder, "stderr")
        with errors.open("w") as stderr:
            started = [
                subprocess.Popen(
                    command, env=environment(peer, world), stdout=stderr, stderr=stderr
                )
                for command in commands(peer, world, plan, folder)
            ]
            try:
                codes = [process.wait(PATIENCE) for process in started]
            except subprocess.TimeoutExpired:
                raise LeftOut(f"{world} ranks were not done after {PATIENCE} s") from None
            finally:
                _end(started)
        if any(codes):
            lines = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
            raise LeftOut(f"{world} ranks ended with {max(codes, key=abs)}: {(lines or [''])[-1]}")
        ranks = [
            [_log(one) for one in json.loads(Path(folder, f"{rank}.json").read_text())]
            for rank in range(world)
        ]
    return table(KIND, peer, ranks).rows


def _end(started: Sequence[subprocess.Popen]) -> None:
    """End what still runs, politely at first: only mpiexec itself can end its ranks."""
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _log(fields: dict) -> Log:
    memcpy = fields["memcpy"]
    return Log([Sample(**sample) for sample in fields["samples"]], memcpy and Sample(**memcpy))


@dataclass
class Result:
    """All rounds of all peers in one world; ``times[peer][in_place][size]`` has one per round."""

    world: int
    times: dict[str, dict[bool, dict[int, list[float]]]]
    wrong: dict[str, int]

    @property
    def sizes(self) -> list[int]:
        return sorted({size for places in self.times.values() for size in places[False]})

    def time(self, peer: str, in_place: bool, size: int) -> float:
        return median(self.times[peer][in_place][size])

    def ratio(self, ours: str, peer: str, in_place: bool, size: int) -> float:
        pairs = zip(self.times[ours][in_place][size], self.times[peer][in_place][size], strict=True)
        return median(a / b for a, b in pairs)


def measure(
    peers: Sequence[str], worlds: Sequence[int], rounds: int, plan: Plan
) -> tuple[list[Result], dict[str, str]]:
    """All results, and why who was left out."""
    left_out: dict[str, str] = {}
    results = []
    bar = Bar("", len(worlds) * rounds * len(peers), "runs")
    done = 0
    for world in worlds:
        runs: dict[str, list[list[Row]]] = {peer: [] for peer in peers}
        for turn in range(rounds):
            first = turn % len(peers)
            for peer in [*peers[first:], *peers[:first]]:
                bar.label = f"{peer}, {world} ranks"
                bar.show(done)
                done += 1
                if peer not in left_out:
                    try:
                        runs[peer].append(run(peer, world, plan))
                    except (LeftOut, OSError) as error:
                        left_out[peer] = str(error)
        results.append(_result(world, {p: rows for p, rows in runs.items() if p not in left_out}))
    bar.clear()
    return results, left_out


def _result(world: int, runs: dict[str, list[list[Row]]]) -> Result:
    times: dict[str, dict[bool, dict[int, list[float]]]] = {}
    for peer, rounds in runs.items():
        times[peer] = {False: {}, True: {}}
        for row in (row for rows in rounds for row in rows):
            times[peer][row.in_place].setdefault(row.size, []).append(row.p50)
    wrong = {peer: sum(r.wrong for rows in rounds for r in rows) for peer, rounds in runs.items()}
    return Result(world, times, wrong)


# -- on paper --------------------------------------------------------------------------------------


def text(result: Result) -> str:
    """Times, and ours by theirs, in 80 columns."""
    ours = [peer for peer in result.times if peer not in FOREIGN]
    theirs = [peer for peer in result.times if peer in FOREIGN]
    peers, pairs = [*ours, *theirs], [(our, peer) for our in ours for peer in theirs]
    lines = [f"{result.world} ranks on {cores()} cores"]
    for in_place in (False, True):
        lines += ["", "in-place" if in_place else "out-of-place", ""]
        lines.append(f"{'size':>6}" + "".join(f"{peer:>10}" for peer in peers) + "   (µs)")
        for size in result.sizes:
            times = (micro(result.time(peer, in_place, size)) for peer in peers)
            lines.append(f"{sizes.written(size):>6}" + "".join(f"{time:>10}" for time in times))
        if pairs:
            lines += ["", f"{'':>6}" + "".join(f"{our + ' /':>8}" for our, _ in pairs)]
            lines.append(f"{'size':>6}" + "".join(f"{peer:>8}" for _, peer in pairs))
        for size in result.sizes if pairs else ():
            ratios = (result.ratio(*pair, in_place, size) for pair in pairs)
            lines.append(f"{sizes.written(size):>6}" + "".join(f"{r:>8.2f}" for r in ratios))
    return "\n".join(lines)


def figures(result: Result) -> dict:
    """The same as data: seconds of every round by size."""
    places = {"out_of_place": False, "in_place": True}
    times = {
        peer: {place: by_place[in_place] for place, in_place in places.items()}
        for peer, by_place in result.times.items()
    }
    return {"world": result.world, "p50_seconds": times, "wrong": result.wrong}


def head(rounds: int, plan: Plan) -> str:
    """Where, what and how."""
    where = machine.here()
    lines = [
        f"all_reduce, {KIND.dtype} {KIND.op}, on {where.processor}, {where.usable} cores",
        f"{where.system}, Python {where.python}, NumPy {where.numpy}",
        f"p50 of the slowest rank, median of {rounds} rounds, {plan.seconds:g} s for each size",
        "Ratios below 1: ours is faster.  In-place over shm is in symmetric arrays (comm.empty).",
    ]
    if not where.quiet:
        lines.append(
            f"Load {where.load}: others are at work here, which costs some more than others."
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*meshes(), *FOREIGN]
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=sizes.bounds, nargs="+", default=[(8, 32 << 20)])
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each size and place")
    parser.add_argument("--peers", nargs="+", choices=known, default=known)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Print the tables, or one JSON object."""
    if sys.argv[1:2] == ["--rank"]:
        peer, folder, counts, seconds, *place = sys.argv[2:]
        run_rank(peer, folder, json.loads(counts), float(seconds), *place)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended, too
    options = arguments()
    counts = counts_of(sizes.merged(options.sizes, options.factor), KIND.dtype)
    plan = Plan(counts, options.seconds, options.environments.absolute())
    title = head(options.rounds, plan)
    results, left_out = measure(options.peers, options.world, options.rounds, plan)
    wrong = sum(count for result in results for count in result.wrong.values())
    if options.json:
        worlds = [figures(result) for result in results]
        where = asdict(machine.here())
        print(json.dumps({"schema": 1, "machine": where, "worlds": worlds, "left_out": left_out}))
    else:
        print("\n\n\n".join([title, *map(text, results)]))
        print("".join(f"\nleft out: {peer}: {why}" for peer, why in left_out.items()))
        print(f"{wrong} wrong entries" if wrong else "All results are right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
