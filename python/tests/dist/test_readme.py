"""The README's example does what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_the_fifteen_lines_train(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert script.count("\n") <= 16
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[ 2.  -1.   0.5] True\n", "")


def test_the_house_is_drawn_as_it_stands() -> None:
    house = README.partition("## The house")[2].partition("\n## ")[0]
    drawn = set(re.findall(r"^ +(\w+)\.py ", house, re.M))
    rooms = {path.stem for path in (ROOT / "python/tinyllm/dist").glob("*.py")}
    assert drawn == rooms - {"__init__"}


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
