"""The wheel, built from this clone, in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
import tinyllm.dist
from tinyllm.dist.comm import spawn

def average(comm):
    return float(comm.all_reduce(comm.rank + 1.0, "mean"))

if __name__ == "__main__":
    assert tinyllm.dist.__file__.startswith(sys.prefix), tinyllm.dist.__file__
    print(spawn(average, 3))
"""


def run(*command: str, cwd: Path) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd)} | {
        name: value for name, value in os.environ.items() if name.startswith("PIP_")
    }
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    run(*build, cwd=ROOT)
    return next(folder.glob("tinyllm_dist-*.whl"))


def test_the_wheel_holds_the_package_and_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "python/tinyllm").rglob("*.py"):
        assert str(path.relative_to(ROOT / "python")) in names
    assert "tinyllm/py.typed" in names
    assert not [name for name in names if "test" in name.lower() and "course" not in name]


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env/bin/python")
    run(python, "-m", "pip", "install", "--quiet", str(wheel), cwd=tmp_path)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    names = {line.partition("==")[0] for line in installed.splitlines()}
    assert names == {"tinyllm-dist", "numpy", "pip", "setuptools"} - ({"setuptools"} - names)
    (tmp_path / "main.py").write_text(SCRIPT)
    assert run(python, "main.py", cwd=tmp_path) == "[2.0, 2.0, 2.0]\n"
    help_text = run(str(tmp_path / "env/bin/tinyllm"), "--help", cwd=tmp_path)
    assert "demo" in help_text
