"""``tinyllm demo`` as a user meets it: output, exit codes, and one line for whatever goes wrong."""

import json
import os
import subprocess
import sys

import pytest

from tinyllm import cli, demo, progress
from tinyllm.demo import worked_table
from tinyllm.dist import CommTimeout, RankError
from tinyllm.progress import Bar

QUICK = ("--world", "3", "--size", "10", "--ranks", "2", "--steps", "3")


def tinyllm(*args, **environment):
    """Run the command with its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "tinyllm", *args],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environment},
    )


def parts(bytes_sent=(8, 8)):
    """A run of part 1 alone, with as many bytes sent as one wishes."""
    yield worked_table.table([[1.0], [2.0]], [[3.0], [3.0]], list(bytes_sent), [[], []])


def raises(error):
    def measured(options):
        raise error
        yield

    return measured


# -- what it prints --------------------------------------------------------------------------------


def test_piped_output_is_plain_text_in_80_columns():
    done = tinyllm("demo", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert all(line == line.rstrip() for line in lines)
    assert [line[:2] for line in lines if line[:1].isdigit()] == ["1.", "2.", "3."]
    assert sum(line.startswith("  PASS") for line in lines) == 8
    assert lines[-1] == "All 8 checks passed."
    assert "c1: 2+200=202" in done.stdout
    assert "106.7 bytes on average, 104 to 112: 1.00x the bound" in done.stdout


def test_json_is_one_object_and_needs_no_rich(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('no rich', name='rich')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = tinyllm("demo", *QUICK, "--json", "--text", str(text), PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert list(figures) == ["schema", "ok", "worked_table", "traffic", "training"]
    assert figures["schema"] == 1
    assert figures["ok"] is True
    assert figures["worked_table"]["results"] == [[111, 222, 333]] * 3
    assert figures["traffic"]["ring"]["sent"] == [104, 112, 104]
    assert len(figures["training"]["many"]["bits"]) == 3
    assert figures["training"]["text_bytes"] == 2048


@pytest.mark.parametrize(("sent", "code", "last"), [
    ((8, 8), 0, "All 3 checks passed."),
    ((8, 9), 1, "1 of 3 checks failed."),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_checks(monkeypatch, capsys, sent, code, last):
    monkeypatch.setattr(demo, "measured", lambda options: parts(sent))
    assert cli.main(["demo"]) == code
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == last
    assert printed.count("FAIL") == code


def test_colours_are_for_terminals(monkeypatch, capsys):
    monkeypatch.setattr(demo, "measured", lambda options: parts())
    monkeypatch.setenv("FORCE_COLOR", "1")  # as good as a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    cli.main(["demo"])
    assert "\x1b[32mPASS" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    cli.main(["demo"])
    assert "\x1b[32m" not in capsys.readouterr().out


# -- what goes wrong -------------------------------------------------------------------------------


def complaint(capsys):
    """The one line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(worked_table, "measure", lambda: pytest.fail("a part was started"))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("content", "words"), [
    (None, "No such file"),
    (b"", "0 bytes; at least 1,000 are needed"),
    (b"x" * 999, "999 bytes; at least 1,000 are needed"),
])  # fmt: skip
def test_a_text_that_will_not_do(tmp_path, capsys, content, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["demo", "--text", str(path)]) == 2
    line = complaint(capsys)
    assert str(path) in line
    assert words in line


@pytest.mark.usefixtures("nothing_starts")
def test_a_directory_is_no_text(tmp_path, capsys):
    assert cli.main(["demo", "--text", str(tmp_path)]) == 2
    assert "Is a directory" in complaint(capsys)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_text(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 2000)
    path.chmod(0)
    assert cli.main(["demo", "--text", str(path)]) == 2
    assert "Permission denied" in complaint(capsys)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("args", [
    ("--size", "1000000000000"),  # more memory than there is
    ("--world", "100000"),  # more pipes than a process may have
    ("--ranks", "100000"),
])  # fmt: skip
def test_more_than_the_machine_can_do(capsys, args):
    assert cli.main(["demo", *args]) == 2
    assert " ".join(args) in complaint(capsys)


@pytest.mark.parametrize("args", [
    (), ("no-such-command",), ("demo", "--world", "0"), ("demo", "--world", "2.5"),
    ("demo", "--size", "-1"), ("demo", "--ranks", "1"), ("demo", "--steps", "0"),
])  # fmt: skip
def test_usage_errors(capsys, args):
    with pytest.raises(SystemExit) as left:
        cli.main(args)
    assert left.value.code == 2
    assert "usage: tinyllm" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
def test_without_rich(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "tinyllm.demo.report", raising=False)
    monkeypatch.delattr(demo, "report", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert cli.main(["demo"]) == 2
    assert "pip install 'tinyllm-dist[cli]'" in complaint(capsys)


@pytest.mark.parametrize(("error", "code", "line"), [
    (KeyboardInterrupt(), 130, "tinyllm: interrupted\n"),
    (RankError("rank 1 raised"), 1, "tinyllm: rank 1 raised\n"),
    (CommTimeout("rank 1 is late"), 1, "tinyllm: rank 1 is late\n"),
    (OSError(24, "too many files"), 1, "tinyllm: too many files\n"),
])  # fmt: skip
def test_a_run_that_ends_early(monkeypatch, capsys, error, code, line):
    monkeypatch.setattr(demo, "measured", raises(error))
    assert cli.main(["demo"]) == code
    assert complaint(capsys) == line


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("tinyllm ")


# -- the progress bar ------------------------------------------------------------------------------


def drawn(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    bar = Bar("training", 10, "steps")
    bar.show(5)
    bar.show(10)
    bar.clear()
    return capsys.readouterr().err


def test_the_bar_is_for_terminals(monkeypatch, capsys):
    assert drawn(monkeypatch, capsys, is_terminal=False) == ""
    half, full, blank, *end = drawn(monkeypatch, capsys, is_terminal=True).split("\r")[1:]
    assert half.count("━") == half.count("─") == progress.WIDTH // 2
    assert full.count("━") == progress.WIDTH
    assert "10/10 steps" in full
    assert (blank, end) == (" " * len(full), ["", ""])
