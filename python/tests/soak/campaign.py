"""A campaign of random faults: each ends soon, under the right name, with nothing left behind.

    python python/tests/soak/campaign.py --faults 1000 --seed 7
    python python/tests/soak/campaign.py --clean 10000 --seed 7

A fault is drawn from: its kind, the rank, the operation, the world (2 to 8), the size, the mesh,
how the ranks are started, and when it comes (before an operation, or in the middle of one).  After
each run it is asked: did spawn come back in time, with the right class of error, naming the right
rank, with its traceback?  Is a process left, or a child of one, a descriptor, a thread, a segment?
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from campaign_faults import FAULTS, OPS, RUN, Plan, clean, run
from dist_worlds import MESHES
from rich.progress import track

from tinyllm.dist import CommError, CommTimeout, DesyncError, RankDied, RankError
from tinyllm.dist.comm import spawn

HANGS = ("stops", "loops")
DISAGREES = ("skips", "calls_another", "calls_another_size", "calls_once_more", "returns_early")
EXPECTED = {
    "raises": RankError,
    "raises_inside": RankError,
    "exits": RankDied,
    "dies": RankDied,
    "is_killed": RankDied,
    "is_killed_inside": RankDied,
    "leaves_a_sleeper": RankDied,
    **dict.fromkeys(HANGS, CommTimeout),
    **dict.fromkeys(DISAGREES, DesyncError),
}
DEADLINE = 20.0  # seconds, for faults that are to be noticed long before
SHORT = 1.5  # for those that only a deadline ends


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    plan: Plan
    world: int
    mesh: str
    method: str

    @property
    def timeout(self) -> float:
        """Seconds that the run gets."""
        start = 0.5 * self.world if self.method == "spawn" else 0.0
        return SHORT + start if self.plan.kind in HANGS else DEADLINE


@dataclass
class Tally:
    """What the campaign found."""

    runs: Counter = field(default_factory=Counter)  # by kind of fault
    meshes: Counter = field(default_factory=Counter)  # and by mesh
    wrong: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # seconds from a crash to its exception


def cases(count: int, seed: int, note: str) -> Iterator[Case]:
    """``count`` random cases; the same for the same seed."""
    rng = random.Random(seed)
    kinds = list(FAULTS)
    for index in range(count):
        world = rng.randint(2, 8)
        kind = kinds[index % len(kinds)]
        op = rng.choice(OPS)
        if kind == "calls_another_size":
            op = rng.choice(("all_reduce", "reduce_scatter", "broadcast"))
        plan = Plan(
            kind=kind,
            rank=rng.randrange(world),
            at=rng.randrange(RUN - 1),
            op=op,
            n=rng.choice([8, 100, 5000, 400_000]),
            delay=rng.choice([0.0, 0.0005, 0.002, 0.01]),
            note=note,
        )
        method = "spawn" if rng.random() < 0.1 else "forkserver"
        yield Case(plan, world, rng.choice(list(MESHES)), method)


def judge(case: Case, tally: Tally) -> None:
    """Run one case, and note what was wrong with how it ended."""
    before = state()
    Path(case.plan.note).unlink(missing_ok=True)
    start = time.monotonic()
    error = failure(case)
    end = time.monotonic()
    tally.runs[case.plan.kind] += 1
    tally.meshes[case.mesh] += 1

    def wrong(what: str) -> None:
        tally.wrong.append(f"{what}: {case}: {error!r}")

    if end - start > case.timeout + 1:
        wrong("late")
    if not isinstance(error, EXPECTED[case.plan.kind]):
        wrong("class")
    elif not right_culprit(case, error):
        wrong("culprit")
    if isinstance(error, RankError) and 'raise ValueError("planned")' not in str(error):
        wrong("traceback")
    if not Path(case.plan.note).exists():
        wrong("it never came to it")
        return
    happened, *left = Path(case.plan.note).read_text().split()
    if case.plan.kind not in HANGS + DISAGREES:
        tally.latencies.append(end - float(happened))
    if any(alive(int(pid)) for pid in left):
        wrong("grandchild")
    for what, count in state().items():
        if count > before[what]:
            wrong(what)


def failure(case: Case) -> BaseException | None:
    """What spawn raised."""
    try:
        spawn(
            run,
            case.world,
            case.plan,
            timeout=case.timeout,
            mesh=MESHES[case.mesh],
            method=case.method,
        )
    except Exception as error:
        return error
    return None


def right_culprit(case: Case, error: CommError) -> bool:
    """Of two that disagree neither is the odd one; nor are sender and receiver, of any world."""
    if error.rank == case.plan.rank:
        return True
    pair = case.world == 2 or "send to" in str(error) or "recv from" in str(error)
    named = f"rank {case.plan.rank}" in str(error)
    return case.plan.kind in DISAGREES and error.rank is None and (pair or named)


def state() -> dict[str, int]:
    """What must not grow: children, descriptors, threads, segments."""
    helpers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    return {
        "orphan": len(children(os.getpid()) - helpers)
        + len(children(forkserver._forkserver._forkserver_pid)),
        "descriptor": len(os.listdir("/dev/fd")),
        "thread": threading.active_count(),
        # Semaphores are other programs': we make none, and share memory without names.
        "segment": len([f for f in os.listdir("/dev/shm") if not f.startswith("sem.")])
        if os.path.isdir("/dev/shm")
        else 0,
    }


def children(pid: int | None) -> set[int]:
    """The children of a process, zombies left out (Linux)."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs, with a moment to end."""
    for _ in range(20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


def campaign(count: int, seed: int) -> Tally:
    """All cases, one after the other."""
    tally = Tally()
    spawn(clean, 1, 0, 0, method="forkserver")  # the server's own descriptors come now
    with tempfile.TemporaryDirectory() as folder:
        for case in progress(cases(count, seed, f"{folder}/note"), count):
            judge(case, tally)
    return tally


def progress(items: Iterable, total: int) -> Iterable:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console

    return track(items, total=total, console=Console(stderr=True), description="faults")


def report(tally: Tally, seed: int) -> None:
    """The table."""
    found = Counter(line.partition(":")[0] for line in tally.wrong)
    over = ", ".join(f"{count:,} over {mesh}" for mesh, count in sorted(tally.meshes.items()))
    print(f"{sum(tally.runs.values()):,} faults, seed {seed}: {over}")
    for kind, count in tally.runs.items():
        print(f"  {kind:<22}{count:>6}  → {EXPECTED[kind].__name__}")
    for what, label in (
        ("late", "returned past deadline + 1 s"),
        ("class", "wrong class of error"),
        ("culprit", "wrong culprit"),
        ("traceback", "without its traceback"),
        ("orphan", "orphans"),
        ("grandchild", "grandchildren left"),
        ("descriptor", "descriptors left"),
        ("thread", "threads left"),
        ("segment", "segments left"),
    ):
        print(f"  {label:<32}{found[what]:>6}")
    if len(tally.latencies) > 1:
        cuts = statistics.quantiles(tally.latencies, n=100)
        median, last = cuts[49] * 1e3, cuts[98] * 1e3
        print(f"  crash to exception: median {median:.0f} ms, 99 % within {last:.0f} ms")
    for line in tally.wrong:
        print(line)


def clean_runs(operations: int, seed: int) -> int:
    """Mixed operations without faults, twice in each world over each mesh; how many went wrong."""
    wrong = 0
    for world in (2, 3, 5, 8):
        seen = []
        for mesh in MESHES:
            for _ in range(2):
                seen.append(spawn(clean, world, seed, operations, timeout=None, mesh=MESHES[mesh]))
            same = all(digests == seen[0] for digests in seen)
            wrong += not same
            print(
                f"{mesh} world {world}: 2 x {operations:,} operations,"
                f" {'the same bits every time, over any mesh' if same else 'OTHER BITS'}",
                flush=True,
            )
    return wrong


def main() -> int:
    """Run what was asked for; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=0, help="how many random faults")
    parser.add_argument("--clean", type=int, default=0, help="how many operations without a fault")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    wrong = clean_runs(options.clean, options.seed) if options.clean else 0
    if options.faults:
        tally = campaign(options.faults, options.seed)
        report(tally, options.seed)
        wrong += len(tally.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
