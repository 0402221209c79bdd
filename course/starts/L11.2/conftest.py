"""Lets plain `pytest` find your comm.py, wherever it is started and whatever else is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
