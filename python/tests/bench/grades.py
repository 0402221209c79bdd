"""The grade of several suites, and how long it takes: `python python/tests/bench/grades.py`.

(a) the model suite, (b) the ten course tests, (c) for each pitfall the model suite without any test
that notices it, (d) a suite that asserts nothing.  Each is graded in a folder of its own by `ol`;
(c) begins with what is known of (a), and says which pitfalls survive.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "python/tests/l11-2-comm"
COURSE_TESTS = ROOT / "course/tests/L11.2"
PLAIN = ROOT / "course/wheats/L11.2/plain_comm.py"
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "python")}


def ol(folder: Path, *command: str) -> tuple[dict, float]:
    """What a command says, and how long it took."""
    started = time.monotonic()
    argv = [sys.executable, "-m", "ol.cli", *command, "L11.2", "--json"]
    run = subprocess.run(argv, cwd=folder, env=ENV, capture_output=True, text=True)
    return json.loads(run.stdout), time.monotonic() - started


def learner(folder: Path, tests: Path | None, state: Path | None = None) -> Path:
    """A repository with a finished file and these tests."""
    ol(folder, "start")
    shutil.copy(PLAIN, folder / "python/tinyllm/dist/comm.py")
    own = folder / "python/tests/l11-2-comm"
    (own / "test_example.py").write_text("def test_nothing():\n    assert True\n")
    if tests is not None:
        (own / "test_example.py").unlink()
        shutil.copytree(tests, own, dirs_exist_ok=True)
    if state is not None:
        shutil.copytree(state, folder / ".ol", dirs_exist_ok=True)
    return folder


def without(folder: Path, names: set[str]) -> None:
    """Take test functions out of a suite."""
    for path in (folder / "python/tests/l11-2-comm").glob("test_*.py"):
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if getattr(node, "name", "") not in names]
        path.write_text(ast.unparse(tree))


def row(what: str, folder: Path) -> None:
    """Grade a suite from nothing and again; print the figures."""
    _, check = ol(folder, "check")
    shutil.rmtree(folder / ".ol")
    found, mutate = ol(folder, "mutate")
    _, again = ol(folder, "mutate")
    statuses = [verdict["status"] for verdict in found["mutants"]["verdicts"]]
    print(
        f"{what:<24} {len(statuses):>7} {found['mutants']['equivalent']:>5}"
        f" {statuses.count('killed'):>7} {statuses.count('timeout'):>5}"
        f" {statuses.count('survived'):>5} {found['mutants']['score']:>6.2f}"
        f" {check:>6.1f} {mutate:>7.1f} {again:>6.1f}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    print(
        f"{'suite':<24} {'mutants':>7} {'equiv':>5} {'killed':>7} {'hung':>5} {'surv':>5}"
        f" {'score':>6} {'check':>6} {'mutate':>7} {'rerun':>6}   (seconds)"
    )
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(n) for n in range(99))

        def new(tests: Path | None, state: Path | None = None) -> Path:
            folder = next(folders)
            folder.mkdir()
            return learner(folder, tests, state)

        model = new(MODEL)
        row("(a) the model suite", model)
        row("(b) the course tests", new(COURSE_TESTS))
        row("(d) assert True", new(None))
        print("\n(c) the model suite without what notices a pitfall")
        for number in range(1, 13):
            pitfall = f"s{number:02}"
            folder, gone = new(MODEL, model / ".ol"), set()
            while True:  # one killer is known at a time
                found, _ = ol(folder, "mutate")
                verdicts = {v["id"]: v for v in found["pitfalls"]}
                if verdicts[pitfall]["status"] == "survived":
                    break
                gone.add(verdicts[pitfall]["test"].partition("::")[2].partition("[")[0])
                without(folder, gone)
            survived = [i for i, v in verdicts.items() if v["status"] == "survived"]
            passed = "passed" if found["passed"] else "not passed"
            print(
                f"{pitfall}  {passed}, names {', '.join(survived)}; score"
                f" {found['mutants']['score']:.2f}; taken out: {', '.join(sorted(gone))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
