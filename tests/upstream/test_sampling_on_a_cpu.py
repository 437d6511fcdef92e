"""Stock vLLM on a CPU samples rows with drafts at temperatures that were never written: what the plugin warns of.

Fails as soon as a supported vLLM does better: then ``preflight.warn_of_sampling`` and README's paragraph are to go.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from vllm.platforms import current_platform
if not current_platform.is_cpu():
    print("null")
    raise SystemExit
current_platform.import_kernels()
from vllm.utils.cpu_triton_utils import _expand_kernel_impl
found = {}
for dtype in (torch.float32, torch.int32, torch.int64):
    expanded, per_request = torch.full((5,), -7, dtype=dtype), torch.tensor([2, 3], dtype=dtype)
    _expand_kernel_impl(expanded, per_request, torch.tensor([2, 5], dtype=torch.int32), 0, 0, 8)
    found[str(dtype)] = expanded.tolist()
print(json.dumps(found))
"""


def test_temperatures_of_rows_with_drafts_are_not_written() -> None:
    """[2, 3] for requests with 2 and 3 rows should become [2, 2, 3, 3, 3], also for float32 (temperature, top-p)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    if (found := json.loads(done.stdout.strip().splitlines()[-1])) is None:
        pytest.skip("this vLLM is not built for a CPU")
    assert found["torch.int64"] == [2, 2, 3, 3, 3], "the kernel itself is right"
    assert found["torch.float32"] == found["torch.int32"] == [-7] * 5, "fixed: remove the warning"
