"""The lab's four extensions as a learner runs them, small; and the model of the first one."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time

import numpy as np
import pytest
from lab_programs import LAB

ROOT = LAB.parents[3]
QUICK = {  # arguments with which each is done soon
    "ext1_tree.py": ("--world", "2", "--bytes", "1000", "--rounds", "1"),
    "ext2_overlap.py": ("--buckets", "2", "--size", "800", "--backward", "2", "--rounds", "1"),
    "ext3_failure.py": ("--world", "2", "--rank", "1"),
    "ext4_sweep.py": ("--world", "2", "--size", "10"),
}


@pytest.fixture
def run(start):
    """Begin an extension with the library of this repository, or with what stands before it."""

    def begin(name, *args, first=()):
        # A rank that exits amid a collective leaves its sockets to the system.
        flags = () if name == "ext3_failure.py" else ("-W", "error")
        path = os.pathsep.join(map(str, [*first, ROOT / "python"]))
        env = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
        return start(*args, program=LAB / name, flags=flags, env=env)

    return begin


def load(name):
    spec = importlib.util.spec_from_file_location(name, LAB / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- ext1: ring against tree -----------------------------------------------------------------------


def test_ring_and_tree_side_by_side(run, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "tree.png"
    sizes = ("--bytes", "1000", "50000")
    program = run("ext1_tree.py", "--world", "3", *sizes, "--rounds", "1", "--plot", str(png))
    code, out, err = program.outcome()
    assert (code, err) == (0, "")
    assert out.startswith("one all-reduce in ms: world=3 on ")
    head, *rows = out.split("\n\n")[1].splitlines()
    assert sorted(head.replace(" doubling", "-doubling").split()) == sorted(
        ["bytes", "ring", "tree", "naive", "recursive-doubling", "halving-doubling"]
    )
    for row, size in zip(rows, ("1,000", "50,000"), strict=True):
        first, *times = row.split()
        assert first == size
        assert sum(time.endswith("*") for time in times) == 1
        assert all(float(time.rstrip("*")) > 0 for time in times)
    assert re.search(r"^one message: α = [\d.]+ µs, β = [\d.]+ ns per byte$", out, re.M)
    for word in ("measured", "predicted"):
        assert re.search(
            rf"^crossover of ring and tree, {word}: +(none: .*|[\d,]+ bytes)$", out, re.M
        )
    assert out.endswith(f"picture: {png}\n")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def tree():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(LAB))
        yield load("ext1_tree")


def test_the_fit_finds_the_two_prices(tree):
    sizes = (1_000, 10_000, 10**6)
    alpha, beta = tree.fit({n: 20e-6 + 0.5e-9 * n for n in sizes})
    assert (alpha, beta) == pytest.approx((20e-6, 0.5e-9))


@pytest.mark.parametrize(("world", "ring", "steps"), [(2, 2, 2), (3, 4, 4), (4, 6, 4), (8, 14, 6)])
def test_the_model_counts_steps_and_bytes(tree, world, ring, steps):
    n = 1_000_000
    assert tree.model("ring", world, n, 1.0, 0.0) == ring
    assert tree.model("tree", world, n, 1.0, 0.0) == steps
    assert tree.model("ring", world, n, 0.0, 1.0) == pytest.approx(2 * (world - 1) / world * n)
    assert tree.model("tree", world, n, 0.0, 1.0) == steps * n


def test_the_crossover_lies_where_the_lines_meet(tree):
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    steep, flat = sizes, np.full(4, 1e4)
    assert tree.crossover(sizes, flat, steep * 0.1) == pytest.approx(1e5)
    assert tree.crossover(sizes, np.sqrt(sizes * 3e4), sizes) == pytest.approx(3e4)
    assert tree.crossover(sizes, steep, steep / 2) is None, "the tree is faster throughout"
    assert tree.crossover(sizes, steep / 2, steep) is None, "the ring is"
    assert tree.crossover(sizes, flat, [2e4, 5e3, 2e4, 2e4]) == pytest.approx(10**4.5), "the last"


# -- ext2: overlap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sleep", "matmul"])
def test_buckets_travel_during_the_backward_pass(run, how):
    small = ("--buckets", "4", "--size", "8000", "--backward", "160", "--rounds", "1")
    code, out, err = run("ext2_overlap.py", *small, "--backward-by", how).outcome()
    assert (code, err) == (0, "")
    assert out.startswith(f"backward pass ({how}) with 4 buckets of 8,000 bytes: world=2 on ")
    for line in ("backward pass alone", "all-reduces alone", "one after the other", "overlapped"):
        assert re.search(rf"^  {line} +[\d.]+ ms$", out, re.M)
    assert re.search(r"^  hidden +-?[\d.]+ ms(, -?\d+% of what the all-reduces added)?$", out, re.M)
    backward, reduced = (re.search(rf"^  {what} *\|(.*)\|$", out, re.M)[1]
                         for what in ("backward", "all-reduce"))  # fmt: skip
    assert list(dict.fromkeys(backward.replace(" ", ""))) == list("0123")
    assert list(dict.fromkeys(reduced.replace(" ", ""))) == list("0123")
    for bucket in "0123":
        assert reduced.index(bucket) >= backward.index(bucket)
    assert reduced.index("0") < backward.rindex("3"), "nothing travels before the pass is over"


def test_a_bucket_begins_without_waiting_for_the_one_before(monkeypatch):
    monkeypatch.syspath_prepend(str(LAB))
    overlap, done = load("ext2_overlap"), []

    class Future:
        def result(self):
            done.append("waits")

    def call(comm, fn, bucket):
        done.append(f"all-reduce {bucket}")
        return Future()

    one_pass = object.__new__(overlap.Pass)
    one_pass.comm, one_pass.grads = None, [0, 1]
    one_pass.backward = lambda bucket: done.append(f"backward {bucket}")
    monkeypatch.setattr(overlap.nonblocking, "call", call)
    one_pass.overlapped()
    begins = ["backward 0", "all-reduce 0", "backward 1", "all-reduce 1"]
    assert done == [*begins, "waits", "waits"]


def test_the_timeline_is_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(LAB))
    overlap, png = load("ext2_overlap"), tmp_path / "overlap.png"
    events = [(0.0, 0.5), (0.5, 0.8)], [(0.5, 0.75), (0.8, 0.95)]
    assert list(overlap.timeline(1.0, events)) == [
        f"backward   |{'0' * 32}{'1' * 20}{' ' * 12}|",
        f"all-reduce |{' ' * 32}{'0' * 17}  {'1' * 10}   |",
        f"{'':<11}0{'1000 ms':>64}",
    ]
    overlap.tools.needs_matplotlib(str(png))
    overlap.tools.picture(png, overlap.draw(1.0, events))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"\npicture: {png}\n"


# -- ext3: failure ---------------------------------------------------------------------------------

LINE = re.compile(r"rank (\d), [\d.]+ s: rank (\d|None) \[(\w+)\] (.*)")


def test_an_exit_is_noticed_by_all_and_blamed_on_one(run):
    world, rank = 4, 2
    args = ("--world", str(world), "--rank", str(rank), "--timeout", "20")
    begun = time.monotonic()
    code, out, err = run("ext3_failure.py", *args, "--how", "exit").outcome()
    assert time.monotonic() - begun < 15, "they waited for their timeout"
    assert (code, err) == (0, "")
    first, *lines, empty, last = out.splitlines()
    assert (first, empty) == (f"rank {rank}: sys.exit(3)", "")
    found = [LINE.match(line).groups() for line in lines]
    said = {int(who): (int(whom), kind) for who, whom, kind, _ in found}
    assert said == {r: (rank, "PeerLost") for r in range(world) if r != rank}
    assert last == f"{world - 1} of {world - 1} survivors named rank {rank}"


def test_a_silent_rank_is_blamed_by_all_when_they_have_waited(run):
    code, out, err = run("ext3_failure.py", "--how", "silent", "--timeout", "1.2").outcome()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "rank 2: SIGSTOP" in lines
    assert re.search(r"^\d\.\d s later, every connection is open and nobody moves:$", out, re.M)
    where = "is in all_reduce #3 (float64[100000], sum)"
    assert f"  rank 2 {where}" in lines
    assert f"  rank 3 {where}, waiting for a message from rank 2" in lines
    found = [line.groups() for line in map(LINE.match, lines) if line]
    assert sorted(who for who, *_ in found) == ["0", "1", "3"]
    assert {whom for _, whom, *_ in found} == {"2"}
    assert "CommTimeout" in {kind for *_, kind, _ in found}
    assert out.endswith("\n3 of 3 survivors named rank 2\n")


def test_ctrl_c_ends_a_stopped_rank_too(run):
    program = run("ext3_failure.py", "--how", "silent", "--timeout", "20")
    assert program.process.stdout.readline() == "rank 2: SIGSTOP\n"
    program.process.send_signal(signal.SIGINT)
    code, _, err = program.outcome()
    assert (code, err) == (130, "ext3_failure.py: interrupted\n")


# -- ext4: the sweep -------------------------------------------------------------------------------


def test_the_rings_volume_does_not_grow(run):
    code, out, err = run("ext4_sweep.py", "--size", "1600").outcome()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "bytes sent per rank in one all-reduce: vector=1,600 doubles, V=12,800 bytes",
        "",
        "world          ring    in V         naive    in V  naive/ring",
        "    2        12,800   1.000        12,800   1.000       1.00x",
        "    4        19,200   1.500        38,400   3.000       2.00x",
        "    8        22,400   1.750        89,600   7.000       4.00x",
        "   16        24,000   1.875       192,000  15.000       8.00x",
    ]


def test_uneven_chunks_are_named(run, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "sweep.png"
    code, out, err = run(
        "ext4_sweep.py", "--world", "3", "--size", "10", "--plot", str(png)
    ).outcome()
    assert (code, err) == (0, "")
    assert out.splitlines()[3:] == [
        "    3           112   1.400           160   2.000       1.43x",
        "",
        "(the busiest rank: where the world does not divide the size, ranks differ)",
        "",
        f"picture: {png}",
    ]
    assert png.read_bytes().startswith(b"\x89PNG")


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_what_is_missing_is_said_in_a_line(run, tmp_path, name):
    (tmp_path / "tinyllm.py").write_text("raise ModuleNotFoundError('No module named tinyllm')")
    code, out, err = run(name, first=[tmp_path]).outcome()
    assert (code, out) == (1, "")
    assert err == (
        f"{name} needs the library of this repository: pip install . where its pyproject.toml"
        " stands\n"
    )


def test_a_picture_needs_matplotlib(run, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('No module')")
    quick = QUICK["ext4_sweep.py"]
    code, out, err = run("ext4_sweep.py", *quick, "--plot", "x.png", first=[tmp_path]).outcome()
    assert (code, out) == (1, "")
    assert err.startswith("ext4_sweep.py needs matplotlib for --plot: pip install matplotlib")


@pytest.mark.parametrize(("name", "args", "says"), [
    ("ext1_tree.py", ("--world", "1"), "--world must be at least 2, got 1"),
    ("ext2_overlap.py", ("--size", "7"), "--size must be at least 8, got 7"),
    ("ext3_failure.py", ("--rank", "4"), "--rank must be below --world 4, got 4"),
    ("ext4_sweep.py", ("--world", "4", "1"), "--world must be at least 2, got [4, 1]"),
])  # fmt: skip
def test_bad_arguments(monkeypatch, capsys, name, args, says):
    monkeypatch.syspath_prepend(str(LAB))
    monkeypatch.setattr("sys.argv", [name, *args])
    with pytest.raises(SystemExit) as left:
        load(name.removesuffix(".py")).main()
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(f"{name}: error: {says}\n")
