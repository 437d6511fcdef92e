"""Checks of kernels against their twins, in Triton's interpreter or on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so these run in a process of their own; ``test_on_device.py``
starts it. By hand: ``TRITON_INTERPRET=1 .venv/bin/pytest tests/kernels/on_device/check_rank.py``.
"""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail("neither TRITON_INTERPRET=1 nor a CUDA device: nothing to run the kernels on")
    return "cuda"


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New tensors hold NaN or the greatest integer, so that an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
