"""``tinyllm bench``: what its figures mean; how large they are is no test's matter."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import peers
import pytest
import shm_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyllm import bench, cli, dist
from tinyllm.bench import cases, machine, plot, sizes, timing
from tinyllm.bench.cases import CASES, Kind
from tinyllm.bench.table import Row, Table, bus_factor, giga, micro, percentile, table
from tinyllm.dist import Comm, RankError, pipe_mesh
from tinyllm.dist.port import Ends

QUICK = ("bench", "--mesh", "pipe", "--seconds", "0.001")


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(bench, "spawn", lambda *args, **options: pytest.fail("ranks were started"))


# -- sizes -----------------------------------------------------------------------------------------

SIZES = st.integers(1, sizes.LARGEST)


@given(SIZES)
def test_a_size_is_read_as_it_is_written(size):
    assert sizes.parsed(sizes.written(size)) == size


@pytest.mark.parametrize(("text", "size"), [
    ("8", 8), ("64K", 65536), ("64k", 65536), ("32MiB", 32 << 20), ("1GB", 1 << 30), ("7B", 7),
])  # fmt: skip
def test_sizes_as_people_write_them(text, size):
    assert sizes.parsed(text) == size


@given(SIZES, SIZES, st.integers(2, 100))
def test_a_range_climbs_by_its_factor_and_ends_at_its_end(low, high, factor):
    low, high = sorted([low, high])
    steps = sizes.steps(*sizes.bounds(f"{sizes.written(low)}:{sizes.written(high)}"), factor)
    assert (steps[0], steps[-1]) == (low, high)
    assert steps[:-1] == [low * factor**k for k in range(len(steps) - 1)]
    assert len(steps) == 1 or steps[-2] < high <= steps[-2] * factor


@given(st.lists(st.tuples(SIZES, SIZES).map(sorted), min_size=1, max_size=5))
def test_ranges_make_one_ascending_list(ranges):
    merged = sizes.merged(ranges, 8)
    assert merged == sorted(set(merged))
    assert {size for both in ranges for size in both} <= set(merged)


@pytest.mark.parametrize("text", ["", "0", "-8", "8.5", "K", "8T", "1e3", "8:", ":8", "8:4", "٣"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"no size|begins above"):
        sizes.bounds(text)


def test_counts_are_whole_entries_and_no_row_comes_twice():
    assert bench.counts_of([1, 7, 8, 9, 16], "float64") == [1, 2]


# -- what a result has to be -----------------------------------------------------------------------


class Place:
    """A rank and a world, without a link to anybody."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world


def filled(kind, count, world, turn, in_place=False):
    """The case on each rank, before the call."""
    ranks = [CASES[kind.collective](Place(r, world), kind, count, in_place) for r in range(world)]
    for case in ranks:
        case.fill(turn)
    return ranks


def complete(ranks):
    """Do what the collective should, by NumPy."""
    collective, op = ranks[0].kind.collective, ranks[0].kind.op
    inputs = [case.x.copy() for case in ranks]
    for case in ranks:
        if collective == "all_gather":
            case.out[:] = np.concatenate(inputs)
        elif collective == "broadcast":
            case.out[:] = inputs[0]
        elif collective == "sendrecv":
            case.out = inputs[case.comm.rank ^ 1] if case.comm.rank ^ 1 < len(ranks) else case.out
        elif collective != "barrier":
            total = np.sum(inputs, axis=0, dtype=case.x.dtype)
            total = total / case.comm.world if op == "mean" else total
            case.out[:] = total[case.own] if collective == "reduce_scatter" else total


@settings(deadline=None)
@given(
    st.sampled_from(list(CASES)), st.sampled_from(bench.DTYPES), st.sampled_from(["sum", "mean"]),
    st.integers(0, 300), st.integers(2, 9), st.integers(0, 500), st.booleans(),
)  # fmt: skip
def test_right_results_have_no_wrong_entry(collective, dtype, op, count, world, turn, in_place):
    if collective != "all_reduce" or not dtype.startswith("float"):
        op = "sum"
    in_place = in_place and CASES[collective].in_place_too
    ranks = filled(Kind(collective, op=op, dtype=dtype), count, world, turn, in_place)
    complete(ranks)
    assert [case.wrong(turn) for case in ranks] == [0] * world


def test_float16_adds_up_exactly_on_many_ranks():
    for op in ("sum", "mean"):
        ranks = filled(Kind("all_reduce", op=op, dtype="float16"), 200, 64, 1)
        complete(ranks)
        assert not any(case.wrong(1) for case in ranks)


def twice(ranks):
    ranks[0].out[:] = 2 * ranks[0].x + ranks[1].x  # and rank 2 not at all


def chunks_swapped(ranks):
    ranks[0].out[:] = np.roll(ranks[0].out, ranks[0].count // 2)


def stale(ranks):
    total = ranks[0].out.copy()
    for case in ranks:
        case.fill(1)
    assert not np.array_equal(sum(case.x for case in ranks), total)
    ranks[0].out[:] = total  # of turn 0


def untouched(ranks):
    ranks[0].fill(0)


@pytest.mark.parametrize("fault", [twice, chunks_swapped, stale, untouched])
def test_a_wrong_result_is_wrong_in_most_entries(fault):
    ranks = filled(Kind("all_reduce"), 1024, 3, 0)
    complete(ranks)
    fault(ranks)
    assert ranks[0].wrong(1 if fault is stale else 0) > 0.85 * 1024


def test_wrong_entries_are_counted_one_by_one():
    ranks = filled(Kind("all_gather"), 64, 2, 0)
    complete(ranks)
    ranks[1].out[[3, 63]] = [-1, np.nan]
    assert [case.wrong(0) for case in ranks] == [0, 2]


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce_scatter", "all_gather"])
def test_in_place_shares_memory_as_in_nccl(collective):
    case = CASES[collective](Place(1, 3), Kind(collective), 10, in_place=True)
    whole, part = sorted([case.x, case.out], key=len, reverse=True)
    whole[:] = range(10)
    assert part.tolist() == ([4, 5, 6] if part.size < 10 else list(range(10)))
    assert (part.size < 10) is (collective in ("reduce_scatter", "all_gather"))


def test_symmetric_arrays_where_the_comm_has_them():
    class Symmetric(Place):
        def empty(self, shape, dtype):
            made.append(shape)
            return np.empty(shape, dtype)

    made = []
    assert CASES["all_reduce"](Symmetric(0, 2), Kind("all_reduce"), 10, in_place=True).symmetric
    assert not CASES["all_reduce"](Symmetric(0, 2), Kind("all_reduce"), 10).symmetric
    assert made == [10]


# -- the clock -------------------------------------------------------------------------------------


class Alone(Place):
    """World 1, and a clock that the case turns."""

    def barrier(self):
        pass


@pytest.mark.parametrize(("call", "turns"), [(1.0, 5), (0.01, 100), (0.001, 1000)])
def test_as_many_turns_as_fit_into_the_time(monkeypatch, call, turns):
    class Ticking(cases.Memcpy):
        def call(self):
            nonlocal now
            super().call()
            now += call

    now = 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    sample = timing.timed(Ticking(Alone(0, 1), Kind("all_reduce"), 4), 1.0)
    assert abs(len(sample.seconds) - turns) <= 1
    assert all(math.isclose(spent, call, rel_tol=1e-6) for spent in sample.seconds)


def log(*seconds, memcpy=(0.5, 0.25)):
    sample = timing.Sample(10, False, False, list(seconds), 1)
    return timing.Log([sample], replace(sample, seconds=list(memcpy)))


def test_the_slowest_rank_counts_turn_by_turn():
    ranks = [[log(1.0, 5.0, 2.0)], [log(4.0, 3.0, 2.0)]]
    (row,) = table(Kind("all_reduce"), "pipe", ranks).rows
    assert (row.turns, row.p50, row.p99, row.wrong) == (3, 4.0, 5.0, 2)
    assert (row.size, row.algbw, row.busbw, row.memcpy) == (80, 20.0, 20.0, 320.0)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_the_percentile_is_one_of_the_values(values):
    assert percentile(values, 99) == np.percentile(values, 99, method="inverted_cdf")


@pytest.mark.parametrize(("collective", "two", "four"), [
    ("all_reduce", 1.0, 1.5), ("reduce_scatter", 0.5, 0.75), ("all_gather", 0.5, 0.75),
    ("broadcast", 1.0, 1.0), ("sendrecv", 1.0, 1.0),
])  # fmt: skip
def test_the_factors_of_nccl_tests(collective, two, four):
    assert (bus_factor(collective, 2), bus_factor(collective, 4)) == (two, four)


# -- the command -----------------------------------------------------------------------------------


def test_json_has_every_figure_of_every_collective(capsys):
    args = ("--collective", "all", "--world", "3", "--sizes", "8", "1000", "--json")
    assert cli.main([*QUICK, *args]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["schema", "ok", "units", "machine", "options", "tables"]
    assert (figures["schema"], figures["ok"]) == (1, True)
    assert figures["machine"]["numpy"] == np.__version__
    assert [(t["collective"], t["world"]) for t in figures["tables"]] == [
        (collective, 3) for collective in CASES
    ]
    for one in figures["tables"]:
        places = [(row["size"], row["count"], row["in_place"]) for row in one["rows"]]
        if one["collective"] == "barrier":
            assert places == [(0, 0, False)]
            assert one["rows"][0]["algbw"] is one["rows"][0]["memcpy"] is None
            continue
        twice = (False,) if one["collective"] == "sendrecv" else (False, True)
        assert places == [(8 * n, n, place) for n in (1, 125) for place in twice]
        for row in one["rows"]:
            assert row["algbw"] == row["size"] / row["p50"]
            factor = float(bus_factor(one["collective"], one["world"]))
            assert row["busbw"] == row["algbw"] * factor
            assert row["wrong"] == 0
            assert row["turns"] >= timing.FEWEST
            assert 0 < row["p50"] <= row["p99"]
            assert row["memcpy"] > 0
            assert row["redop"] == ("sum" if "reduce" in one["collective"] else None)


def test_algorithms_ops_and_dtypes(capsys):
    args = ("--algorithm", "auto", "tree", "--op", "mean", "--dtype", "float16", "--sizes", "999")
    assert cli.main([*QUICK, *args, "--world", "3", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert [one["algorithm"] for one in tables] == ["tree", "auto"]
    assert {(row["type"], row["redop"]) for one in tables for row in one["rows"]} == {
        ("float16", "mean")
    }


def test_piped_output_is_plain_text_in_80_columns():
    collectives = ("--collective", "all_reduce", "sendrecv", "barrier")
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm", *QUICK, "--sizes", "8:4K", "--world", "2", *collectives],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env={**os.environ, "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert all(line == line.rstrip() for line in lines)
    headings = [line for line in lines if " over pipe, 2 ranks on " in line]
    assert [line.split()[0] for line in headings] == ["all_reduce", "sendrecv", "barrier"]
    rows = [line.split() for line in lines if "float64" in line]
    assert [row[:4] for row in rows[:4]] == [
        [size, count, "float64", "sum"]
        for size, count in [("8", "1"), ("64", "8"), ("512", "64"), ("4K", "512")]
    ]
    assert all(len(row) == 11 for row in rows)
    assert lines[-1].startswith("All results of ")


class Broken(Comm):
    """Rank 1's first entry is one too many."""

    def all_reduce(self, x, op="sum", *, out=None):
        result = super().all_reduce(x, op, out=out)
        result[0] += self.rank == 1
        return result


def broken_mesh(world):
    return [Ends(ends.rank, ends.channels, Broken) for ends in pipe_mesh(world)]


def test_a_broken_collective_is_counted_and_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(bench, "meshes", lambda: {"pipe": broken_mesh})
    assert cli.main([*QUICK, "--sizes", "80", "--world", "3", "--json"]) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["ok"] is False
    (one,) = figures["tables"]
    assert [row["wrong"] for row in one["rows"]] == [
        row["turns"] + timing.WARM_UP for row in one["rows"]
    ]


ROW = Row(
    size=8,
    count=1,
    type="float64",
    redop="sum",
    in_place=False,
    symmetric=False,
    turns=9,
    p50=1e-5,
    p99=2e-5,
    algbw=8e5,
    busbw=8e5,
    wrong=0,
    memcpy=1e7,
)
OPTIONS = bench.Options(["all_reduce"], ["pipe"], ["ring"], [2, 4], [8], "sum", "float64", 0.2)


def made_up(world=2, mesh="pipe", **changed):
    rows = [
        replace(ROW, size=8 << k, count=1 << k, in_place=place, **changed)
        for k in range(0, 23, 3)
        for place in (False, True)
    ]
    return Table("all_reduce", "ring", mesh, world, rows)


def test_large_figures_stay_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")  # too narrow: the terminal wraps, nothing is lost
    huge = {"size": 1 << 30, "count": 1 << 30, "p50": 123.4, "p99": 1234.5, "turns": 99_999}
    fast = {"algbw": 123e9, "busbw": 123e9, "memcpy": 120e9}
    one = Table("reduce_scatter", None, "pipe", 128, [replace(ROW, wrong=99_999, **huge, **fast)])
    bench.shown(machine.here(), replace(OPTIONS, collectives=list(CASES)), [one])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    line = next(line for line in out.splitlines() if "float64" in line).split()
    assert line[:6] == ["1G", "1073741824", "float64", "sum", "123.4s", "1234s"]
    assert line[6:] == ["123.00", "123.00", "99,999", "120.00", "99999"]
    assert out.splitlines()[-1] == "99,999 entries are wrong."


def test_colours_are_for_terminals(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as good as a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bench.shown(machine.here(), OPTIONS, [made_up(wrong=3)])
    assert "\x1b[1;31m    3" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    bench.shown(machine.here(), OPTIONS, [made_up(wrong=3)])
    assert "\x1b[1;31m" not in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0.0"), (1.26e-6, "1.3"), (999.94e-6, "999.9"), (999.96e-6, "1000"), (0.9999994, "999999"),
    (0.9999996, "1s"), (12.3456, "12.35s"),
])  # fmt: skip
def test_microseconds_in_six_characters(seconds, text):
    assert micro(seconds) == text
    assert len(text) <= 6


def test_bandwidths():
    assert [giga(None), giga(0.0), giga(12.345e9)] == ["-", "0.00", "12.35"]


def test_a_loaded_machine_is_said_to_be_one(capsys):
    for load, told in ((0.4, False), (9.5, True), (None, False)):
        bench.shown(replace(machine.here(), cores=2, load=load), OPTIONS, [])
        assert ("others are at work" in capsys.readouterr().out) is told


def test_cores_are_written_in_runs():
    assert machine.written([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert machine.written([]) == ""


def test_the_meshes_are_those_of_the_library():
    assert [f"{name}_mesh" for name in bench.meshes()] == [
        name for name in ("pipe_mesh", "tcp_mesh", "shm_mesh") if hasattr(dist, name)
    ]


# -- the picture -----------------------------------------------------------------------------------


def test_the_picture_opens(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "bench.png"
    tables = [made_up(world, mesh) for world in (2, 4) for mesh in ("pipe", "tcp")]
    barrier = Table("barrier", None, "pipe", 3, [replace(ROW, size=0, count=0, busbw=None)])
    bench.plotted(str(path), machine.here(), [*tables, barrier])
    pixels = image.imread(path)
    assert pixels.shape[:2] == (960, 120 * 13)
    assert 0.8 < pixels.mean() < 0.99  # lines on white
    assert "matplotlib.pyplot" not in sys.modules  # whose figures would outlive the call


def test_lines_are_named_by_what_tells_them_apart():
    tables = [made_up(2, "pipe"), made_up(4, "pipe"), made_up(2, "tcp")]
    assert plot._names(tables) == ["over pipe", "over tcp"]
    assert plot._names(tables[:1]) == ["all_reduce over pipe"]
    assert plot._names([tables[0], replace(tables[0], algorithm="tree")]) == ["by ring", "by tree"]


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [
    "--sizes 0", "--sizes 8:4", "--sizes many", "--world 1", "--world two", "--seconds 0",
    "--seconds nan", "--seconds inf", "--collective reduce", "--mesh quic", "--algorithm star",
    "--factor 1", "--op max", "--dtype str", "--sizes",
])  # fmt: skip
@pytest.mark.usefixtures("nothing_starts")
def test_usage_errors(capsys, args):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *args.split()])
    assert left.value.code == 2
    assert "usage: tinyllm bench" in capsys.readouterr().err


def complaint(capsys):
    """The one line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("args", "words"), [
    ("--op mean --dtype int8", "the mean of int8 is no int8"),
    ("--algorithm tree --collective broadcast", "--algorithm is for all_reduce"),
    ("--sizes 1024G", "and this machine has"),
    ("--plot bench.txt", "ends in .png, .svg, .pdf"),
    ("--plot no/such/bench.png", "no such directory"),
    ("--plot bench.png --collective barrier", "a barrier has none"),
])  # fmt: skip
@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_be_measured(capsys, args, words):
    assert cli.main(["bench", *args.split(), "--json"]) == 2
    assert words in complaint(capsys)


@pytest.mark.parametrize(("missing", "args", "words"), [
    ("rich", [], "pip install 'tinyllm-dist[cli]'"),
    ("matplotlib", ["--plot", "bench.png"], "pip install 'tinyllm-dist[plot]'"),
])  # fmt: skip
@pytest.mark.usefixtures("nothing_starts")
def test_without_an_extra(monkeypatch, capsys, missing, args, words):
    for name in ("tinyllm.screen", "tinyllm.bench.report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("tinyllm.screen", raising=False)
    monkeypatch.delattr(bench, "report", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["bench", *args]) == 2
    assert words in complaint(capsys)


def test_a_rank_that_fails(monkeypatch, capsys):
    def fail(*args, **options):
        raise RankError("rank 1 raised")

    monkeypatch.setattr(bench, "spawn", fail)
    assert cli.main(["bench", "--json"]) == 1
    assert complaint(capsys) == "tinyllm: rank 1 raised\n"


# -- the peers -------------------------------------------------------------------------------------


def test_a_peer_that_is_not_there_is_named_and_left_out(tmp_path):
    plan = peers.Plan([1, 100], 0.001, tmp_path)
    (result,), left_out = peers.measure(["pipe", "mpich", "gloo"], [2], 1, plan)
    assert list(left_out) == ["mpich", "gloo"]
    assert "is not there; make bench-peers installs it" in left_out["mpich"]
    assert result.sizes == [8, 800]
    assert result.wrong == {"pipe": 0}
    assert all(len(result.times["pipe"][place][800]) == 1 for place in (False, True))


def test_peers_in_80_columns():
    names = ["pipe", "tcp", "shm", *peers.FOREIGN]
    runs = {
        name: [[replace(ROW, in_place=place, p50=(1 + k) * 0.3) for place in (False, True)]] * 3
        for k, name in enumerate(names)
    }
    result = peers._result(4, runs)
    assert result.ratio("tcp", "mpich", False, 8) == 0.5
    assert max(map(len, peers.text(result).splitlines())) <= 80
    assert peers.figures(result)["p50_seconds"]["pipe"]["in_place"] == {8: [0.3] * 3}


def test_the_ratio_is_taken_within_the_rounds():
    times = {"pipe": [1.0, 2.0, 9.0], "gloo": [2.0, 4.0, 3.0]}
    runs = {name: [[replace(ROW, p50=t)] for t in each] for name, each in times.items()}
    assert peers._result(2, runs).ratio("pipe", "gloo", False, 8) == 0.5


def test_settings_of_open_mpi_depend_on_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "cores", lambda: 2)
    python = tmp_path / "peers-openmpi/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    plan = peers.Plan([1], 0.1, tmp_path)
    for world, few in ((2, True), (4, False)):
        (command,) = peers.commands("openmpi", world, plan, "folder")
        assert ("--oversubscribe" not in command) is few
        assert ("OMPI_MCA_mpi_yield_when_idle" not in peers.environment("openmpi", world)) is few


# -- the profile -----------------------------------------------------------------------------------


def test_the_profile_can_still_look_inside() -> None:
    for size in (8, 1 << 16):
        for symmetric in (False, True):
            assert 0 < shm_profile.bare(size, symmetric) < 1e5
            assert 0 < shm_profile.alone(size, symmetric) < 1e5
    times = dict(shm_profile.parts())
    assert list(times) == list(shm_profile.PARTS) and min(times.values()) > 0
