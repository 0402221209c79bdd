"""Part 3: data-parallel training, on one process and on several ranks, from the same seed.

Each step draws one batch, the same on every rank.  A rank computes the gradient of its slice; one
all_reduce averages the gradients; every rank takes the same step.  So the replicas stay equal bit
for bit, and the losses are those of one process, up to the order in which numbers are added.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from hashlib import sha256
from statistics import fmean

import numpy as np

from tinyllm.demo.adam import Adam
from tinyllm.demo.check import Check
from tinyllm.demo.model import BYTES, ByteModel, Bytes, Floats
from tinyllm.dist import Comm, chunk_bounds, cores, spawn
from tinyllm.progress import Bar

BATCH = 512
HELD_OUT = 8192  # at most so many bytes of the held-out text are predicted
TIMEOUT = 3600.0  # seconds

# Sums in another order differ by some 1e-16 of their size.  Training makes more of that, slowly:
# 2e-12 was seen after 1,500 steps of a small batch.  A wrong slice or a wrong factor shows in the
# second digit of the first steps.
TOLERANCE = 1e-9
COMPARED = 1000  # steps, at most; beyond, rounding may have grown without anything being wrong


@dataclass(frozen=True)
class Plan:
    """What all ranks of all runs have in common."""

    steps: int
    batch: int = BATCH
    seed: int = 2009


@dataclass(frozen=True)
class RankLog:
    """What one rank brings home."""

    losses: list[float]  # nats per byte and step, over the whole batch
    seconds: float  # of all steps
    cpu_seconds: float
    all_reduce_seconds: float
    held_out: float  # nats per byte
    digest: str  # of all parameters
    blas_threads: int


@dataclass(frozen=True)
class Run:
    """One training run, in numbers; bits are bits per byte."""

    ranks: int
    blas_threads: int  # per rank
    bits: list[float]  # the loss of each step
    held_out_bits: float
    step_seconds: float  # the mean
    bytes_per_second: float  # bytes predicted: batch / step_seconds
    cpu_seconds_per_step: float  # of all ranks together
    all_reduce_share: float  # of the time, waiting included; the mean over the ranks
    digests: list[str]  # by rank


@dataclass(frozen=True)
class Training:
    """One process against several ranks."""

    text: str
    text_bytes: int
    unigram_bits: float  # the held-out text, by how often each byte stands in the training text
    steps: int
    batch: int
    parameters: int
    cores: int
    one: Run
    many: Run
    difference: float  # the largest between the losses of the first COMPARED steps, relative
    checks: list[Check]


# -- in the ranks ----------------------------------------------------------------------------------


def split(text: bytes) -> tuple[Bytes, Bytes]:
    """Nine tenths to learn from, the last tenth to be judged by."""
    whole = np.frombuffer(text, np.uint8)
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


def windows(text: Bytes, positions: np.ndarray, context: int) -> tuple[Bytes, Bytes]:
    """The ``context`` bytes before each position, and the byte that stands there."""
    return text[positions[:, None] + np.arange(-context, 0)], text[positions]


def my_slice(comm: Comm, text: Bytes, context: int, plan: Plan, step: int) -> tuple[Bytes, Bytes]:
    """The rank's part of the step's batch, which seed and step alone decide."""
    rng = np.random.default_rng([plan.seed, step])
    positions = rng.integers(context, len(text), plan.batch)
    start, stop = chunk_bounds(plan.batch, comm.world)[comm.rank]
    return windows(text, positions[start:stop], context)


def train(comm: Comm, text: bytes, plan: Plan) -> RankLog:
    """Train one replica, together with the other ranks."""
    learn, judge = split(text)
    model = ByteModel(np.random.default_rng([plan.seed, comm.rank]))  # unlike the others, until ...
    comm.broadcast(model.params, src=0, out=model.params)  # ... here
    adam = Adam(model.params)
    bar = Bar(f"training, {ranks(comm.world)}", plan.steps, "steps", wanted=comm.rank == 0)
    losses, all_reduce_seconds = [], 0.0
    start, cpu_start = time.perf_counter(), time.process_time()
    for step in range(plan.steps):
        batch = my_slice(comm, learn, model.context, plan, step)
        losses.append(model.backward(*batch, count=plan.batch / comm.world))
        all_reduce_seconds += _average(comm, model.grad)
        adam.step(model.grad)
        bar.show(step + 1)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    bar.clear()
    return RankLog(
        losses=comm.all_reduce(np.array(losses), "mean").tolist(),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        all_reduce_seconds=all_reduce_seconds,
        held_out=_held_out(model, judge) if comm.rank == 0 else math.nan,
        digest=sha256(model.params.data).hexdigest(),
        blas_threads=_blas_threads(),
    )


def _average(comm: Comm, grad: Floats) -> float:
    """Make ``grad`` the mean over all ranks; return the seconds that it took, waiting included."""
    start = time.perf_counter()
    comm.all_reduce(grad, "mean", out=grad)
    return time.perf_counter() - start


def _held_out(model: ByteModel, text: Bytes) -> float:
    """The loss on positions spread evenly over a text that the model has not seen."""
    room = len(text) - model.context
    positions = model.context + np.linspace(0, room - 1, min(room, HELD_OUT)).astype(np.intp)
    return model.loss(*windows(text, positions, model.context))


def _blas_threads() -> int:
    """The threads that spawn, or the user, gave to the matrix products of this process."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return cores()


# -- in the parent ---------------------------------------------------------------------------------


def measure(text: bytes, name: str, world: int, plan: Plan) -> Training:
    """Train twice: on one process, then on ``world`` ranks."""
    one, many = _run(text, 1, plan), _run(text, world, plan)
    compared = min(plan.steps, COMPARED)
    ours, theirs = np.array(one.bits[:compared]), np.array(many.bits[:compared])
    difference = float(np.max(np.abs(ours - theirs) / ours))
    checks = [
        Check(
            f"losses of {compared:,} steps: {difference:.0e} apart at most, relative"
            f" (limit {TOLERANCE:.0e})",
            difference <= TOLERANCE,
        ),
        Check("all replicas end with the same parameters, bit for bit", _one_value(many.digests)),
    ]
    return Training(
        text=name,
        text_bytes=len(text),
        unigram_bits=_unigram_bits(*split(text)),
        steps=plan.steps,
        batch=plan.batch,
        parameters=ByteModel(np.random.default_rng(0)).params.size,
        cores=cores(),
        one=one,
        many=many,
        difference=difference,
        checks=checks,
    )


def _run(text: bytes, world: int, plan: Plan) -> Run:
    logs = spawn(train, world, text, plan, timeout=TIMEOUT)
    step_seconds = fmean(log.seconds for log in logs) / plan.steps
    return Run(
        ranks=world,
        blas_threads=logs[0].blas_threads,
        bits=[loss / math.log(2) for loss in logs[0].losses],
        held_out_bits=logs[0].held_out / math.log(2),
        step_seconds=step_seconds,
        bytes_per_second=plan.batch / step_seconds,
        cpu_seconds_per_step=sum(log.cpu_seconds for log in logs) / plan.steps,
        all_reduce_share=fmean(log.all_reduce_seconds / log.seconds for log in logs),
        digests=[log.digest for log in logs],
    )


def _unigram_bits(learn: Bytes, judge: Bytes) -> float:
    """Bits per byte of a guess that knows only how frequent each byte is."""
    counts = np.bincount(learn, minlength=BYTES) + 1.0  # no byte is impossible
    return float(-np.log2(counts / counts.sum())[judge].mean())


def _one_value(values: list[str]) -> bool:
    return len(set(values)) == 1


def ranks(world: int) -> str:
    """What a run is called."""
    return "one process" if world == 1 else f"{world} ranks"
