"""Lets the tests of this folder import what they share with ``unit`` and ``parity``: tiny models."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "unit"), str(TESTS / "parity")]
