"""Waves of whole experts give the bits of one call, for a kernel whose result depends on an expert's other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_spac.execution.host.slot_runner import Wave, by_expert
from vllm_spac.execution.waves import row_waves

EXPERTS, HIDDEN = 6, 4


class Kernel:
    """As vLLM's FP8 kernel for a CPU: it rounds differently for more than two rows of an expert, and to bfloat16.

    Attributes:
        seen: experts of each call.
    """

    activation, takes_slots, by_expert = "silu", True, True

    def __init__(self, slot_of: list[int]) -> None:
        self.seen: list[set[int]] = []
        self._expert_in = {slot: expert for expert, slot in enumerate(slot_of)}

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        experts = torch.tensor([[self._expert_in[int(slot)] for slot in row] for row in ids]).reshape(ids.shape)
        self.seen.append(set(experts.flatten().tolist()))
        counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
        scale = 1 + experts.float() / 7 + (counts[experts] > 2) / 129
        parts = (x.float()[:, None] * (scale * weights)[..., None]).to(x.dtype)
        return parts.float().sum(1).to(x.dtype)


def made_resident(ids: Tensor, slots: int, slot_of: list[int]) -> Iterator[Wave]:
    for rows in row_waves(ids.numpy(), slots, EXPERTS):
        assert len(ids[rows].unique()) <= slots
        found = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        yield Wave(found, torch.tensor(slot_of)[ids[rows].long()].to(ids.dtype))


@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(0, 2**16),
    st.integers(3, EXPERTS),
    st.permutations(range(10, 10 + EXPERTS)),
)
def test_one_call_and_waves_are_equal(rows: int, top_k: int, seed: int, slots: int, slot_of: list[int]) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=rng).bfloat16()
    weights = torch.rand(rows, top_k, generator=rng)
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:top_k] for _ in range(rows)]).int()
    kernel, calls = Kernel(slot_of), []
    whole = kernel(x, weights, torch.tensor(slot_of)[ids.long()])
    kernel.seen.clear()
    found = by_expert(
        x, weights, ids, kernel, lambda pairs: made_resident(pairs, slots, slot_of), lambda: calls.append(len(calls))
    )
    assert torch.equal(found, whole)
    every = [expert for experts in kernel.seen for expert in experts]
    assert len(every) == len(set(every)) == len(ids.unique()), "each expert is in one wave"
    assert all(len(experts) <= slots for experts in kernel.seen) and len(calls) == len(kernel.seen)


def test_a_kernel_that_takes_no_slots_is_a_mistake() -> None:
    kernel = Kernel(list(range(EXPERTS)))
    kernel.takes_slots = False  # type: ignore[misc]
    with pytest.raises(AssertionError):
        by_expert(torch.ones(1, HIDDEN), torch.ones(1, 1), torch.zeros(1, 1).int(), kernel, lambda _: iter(()))
