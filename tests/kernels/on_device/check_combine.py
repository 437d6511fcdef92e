"""Checks ``combine`` by hand; ``check_grouped_gemm`` checks what it sums."""

import torch
from vllm_spac.kernels.combine import combine


def test_it_sums_in_the_order_of_slots(device):
    """1e8 + 1 - 1e8 is 0 or 1 in float32, by the order."""
    y = torch.tensor([[[1.0], [1e8], [-1e8]], [[1e8], [-1e8], [1.0]], [[1e8], [float("nan")], [2.0]]])
    weights = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 0, 1]])  # the last row's NaN was never written: weight 0
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [-1, 1, 2]])
    out = torch.full((3, 1), float("nan"), device=device)
    combine(y.to(device), weights.to(device), ids.to(device), 3, out)
    assert out.flatten().tolist() == [0.0, 1.0, 2.0]
