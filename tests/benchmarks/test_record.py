"""``benchmarks/replay/record.py`` on the toy model: a trace that the other files of its folder can read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm_spac.recording.trace_file import DRAFT, ROW_KINDS, Trace

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "replay" / "record.py"


@pytest.mark.full
def test_records_drafts(tmp_path: Path) -> None:
    options = ("--case", "eagle4_1", "--prompts", "1", "--output-tokens", "12", "--folder", tmp_path)
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.trace")
    trace = Trace.load(path)
    verified = trace.row_kind == ROW_KINDS.index("verify")
    assert path.name == "eagle4_1.trace" and trace.facts.layers == 6
    assert np.count_nonzero(trace.row_kind == DRAFT) == 4 * np.count_nonzero(verified) > 0
    assert int(trace.step_tokens.sum()) >= 12
