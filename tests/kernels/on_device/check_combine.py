"""Checks ``combine`` by hand; ``check_grouped_gemm`` checks what it sums."""

import pytest
import torch
from vllm_spac.kernels.combine import combine
from vllm_spac.kernels.reference import combine as reference
from vllm_spac.kernels.types import Division, Mail


def test_it_sums_in_the_order_of_slots(device):
    """1e8 + 1 - 1e8 is 0 or 1 in float32, by the order."""
    y = torch.tensor([[[1.0], [1e8], [-1e8]], [[1e8], [-1e8], [1.0]], [[1e8], [float("nan")], [2.0]]])
    weights = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 0, 1]])  # the last row's NaN was never written: weight 0
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [-1, 1, 2]])
    out = torch.full((3, 1), float("nan"), device=device)
    combine(y.to(device), weights.to(device), ids.to(device), 3, out)
    assert out.flatten().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("d", [16, 1000, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arrived", [True, False])
def test_it_adds_what_the_cpu_has_computed_or_the_device_in_its_place(device, d, dtype, arrived):
    """What does not count is NaN: results of rows without a pair of the CPU's, and the other side's numbers."""
    rng, rows, k = torch.Generator().manual_seed(0), 5, 3
    y, results, left = torch.randn(rows, k, d, generator=rng), torch.randn(8, d, generator=rng), torch.zeros(8, k)
    for row in (0, 3):
        left[row, row % k] = 0.5
    theirs = left[:rows] != 0
    if arrived:
        y[theirs], results[[1, 2, 4]] = float("nan"), float("nan")
    else:
        results.fill_(float("nan"))
    weights, ids = torch.ones(rows, k), torch.zeros(rows, k, dtype=torch.int32)
    ids[4, 2], y[4, 2] = -1, float("nan")
    nothing, found = torch.zeros(1, dtype=torch.int32), []
    for function, where in ((combine, device), (reference.combine, "cpu")):
        state = torch.tensor([1, int(arrived)], dtype=torch.int32, device=where)
        division = Division(nothing, nothing, state, nothing, left, left.to(where), nothing)
        mail = Mail(nothing, nothing, nothing, ids, left, y, results.pin_memory() if where == "cuda" else results)
        out = torch.full((rows, d), float("nan"), dtype=dtype, device=where)
        function(y.to(dtype).to(where), weights.to(where), ids.to(where), 1, out, None, division, mail)
        found.append(out.cpu())
    assert torch.equal(*found) and not found[0].isnan().any()
    counted = torch.where((theirs & arrived)[..., None] | (ids < 0)[..., None], 0, y.to(dtype).float())
    total = counted[:, 0] + counted[:, 1] + counted[:, 2]
    if arrived:
        total[[0, 3]] += results[[0, 3]]
    assert torch.equal(found[0], total.to(dtype))
