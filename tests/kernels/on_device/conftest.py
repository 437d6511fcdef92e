"""Checks of kernels against their twins, in Triton's interpreter or on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so these run in a process of their own; ``test_on_device.py``
starts it. By hand: ``TRITON_INTERPRET=1 .venv/bin/pytest tests/kernels/on_device/check_rank.py``.
"""

import os

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail("neither TRITON_INTERPRET=1 nor a CUDA device: nothing to run the kernels on")
    return "cuda"


@pytest.fixture(autouse=True, scope="session")
def rounding():
    """Triton 3.9's interpreter cuts float32 off where a GPU rounds it to the nearest bfloat16."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        nearest = torch.from_numpy(np.array(src.data, ndmin=1)).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(nearest.reshape(np.shape(src.data)), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", rounded)
        yield


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New tensors hold NaN or the greatest integer, so that an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
