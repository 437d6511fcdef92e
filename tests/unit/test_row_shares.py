"""Dividing a layer's pairs between two processors: every pair once, no row with a foreign expert, no bit lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_spac.execution.row_shares import Share, combine

IDS = torch.tensor([[3, 1, 2], [0, 1, 2], [5, 4, 0]], dtype=torch.int32)


def masks(rows: int = 3, top_k: int = 3) -> st.SearchStrategy[Tensor]:
    flags = st.lists(st.booleans(), min_size=rows * top_k, max_size=rows * top_k)
    return flags.map(lambda values: torch.tensor(values, dtype=torch.bool).view(rows, top_k))


@given(masks())
@settings(deadline=None)
def test_each_pair_is_in_one_share_and_each_row_keeps_to_its_experts(cold: Tensor) -> None:
    weights = torch.arange(1.0, 10.0).view(3, 3)
    x = torch.arange(3.0)[:, None]
    total = torch.zeros(3, 6)
    for share in (Share.of(IDS, cold), Share.of(IDS, ~cold)):
        rows, w = share.pick(x, weights)
        assert share.ids.dtype == IDS.dtype and share.rows.tolist() == rows.flatten().tolist()
        assert share.own.any(dim=1).all(), "a row without a pair is left out"
        for row, ids, parts, own in zip(share.rows.tolist(), share.ids.tolist(), w.tolist(), share.own, strict=True):
            mine = set(IDS[row][own].tolist())
            assert set(ids) == mine, "a row meets an expert that is not its own here"
            for expert, weight in zip(ids, parts, strict=True):
                total[row, expert] += weight
    expected = torch.zeros(3, 6).scatter_add_(1, IDS.long(), weights)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combining_adds_in_float32_and_rounds_once(dtype: torch.dtype) -> None:
    """1 + 2**-8 + 2**-8 is 1 + 2**-7 in bfloat16, unless it is rounded on the way."""
    cold = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    shares = [Share.of(IDS, cold), Share.of(IDS, ~cold)]
    odd = torch.full((1, 2), 0.1).to(dtype)
    parts = [torch.cat([torch.full((1, 2), 2 * 2.0**-8), odd.float()]), torch.cat([torch.ones(1, 2).to(dtype), odd])]
    out = combine(torch.empty(3, 2, dtype=dtype), zip((share.rows for share in shares), parts, strict=True))
    assert out.dtype == dtype
    assert torch.equal(out, torch.cat([torch.full((1, 2), 1 + 2.0**-7).to(dtype), odd, odd]))
