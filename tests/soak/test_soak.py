"""The soak of ``make soak``, for a few minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]  # servers start slowly on a busy machine


def test_a_short_soak(tmp_path):
    output = tmp_path / "soak.json"
    command = [sys.executable, str(Path(__file__).with_name("soak.py")), "--minutes", "3", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stdout)
    facts = json.loads(output.read_text())
    assert facts["problems"] == [] and len(facts["samples"]) > 10
