"""Waves of rows: each as long as the slots allow, whatever the chunk size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.execution import _waves as waves


def one_row_at_a_time(ids: np.ndarray, slots: int) -> list[tuple[int, int]]:
    """The definition: a row joins the wave unless the wave would then need more experts than there are slots."""
    found, start, needed = [], 0, set()
    for row, experts in enumerate(ids.tolist()):
        if len(needed | set(experts)) > slots:
            found.append((start, row))
            start, needed = row, set()
        needed |= set(experts)
    return [*found, (start, len(ids))] if len(ids) else []


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(0, 60),
    experts=st.integers(2, 12),
    more=st.integers(0, 12),
    look_ahead=st.sampled_from([1, 2, 7, 1024]),
    seed=st.integers(0, 2**32 - 1),
)
def test_waves_are_as_long_as_the_slots_allow(rows, experts, more, look_ahead, seed):
    rng, top_k = np.random.default_rng(seed), 2
    ids = np.array([rng.permutation(experts)[:top_k] for _ in range(rows)], dtype=np.int32).reshape(rows, top_k)
    slots = min(top_k + more, experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waves, "_LOOK_AHEAD", look_ahead)
        assert list(waves.row_waves(ids, slots, experts)) == one_row_at_a_time(ids, slots)


@given(layers=st.integers(1, 9), experts=st.integers(1, 20), share=st.floats(0, 1))
def test_slots_are_filled_with_an_equal_share_of_each_layer(layers, experts, share):
    slots = round(share * layers * experts)
    filled = waves.filled_experts(layers, experts, slots)
    sizes = [len(keys) for keys in filled]
    assert sum(sizes) == slots and max(sizes) - min(sizes) <= 1
    assert all(keys == list(range(layer * experts, layer * experts + len(keys))) for layer, keys in enumerate(filled))
    if slots == layers * experts:
        assert [key for keys in filled for key in keys] == list(range(slots))


@given(
    layers=st.integers(1, 9), experts=st.integers(1, 20), share=st.floats(0, 1), some=st.floats(0, 1), data=st.data()
)
def test_some_experts_are_loaded_first(layers, experts, share, some, data):
    total = layers * experts
    slots = round(share * total)
    first = data.draw(st.permutations(range(total)))[: round(some * slots)]
    filled = waves.filled_experts(layers, experts, slots, first)
    keys = [key for part in filled for key in part]
    assert len(set(keys)) == len(keys) == slots
    if slots == total:
        assert keys == list(range(total)), "slot and key are the same number"
        return
    assert keys[: len(first)] == first
    sizes = [len(part) for part in filled[-layers:]]
    left = [experts - sum(key // experts == layer for key in first) for layer in range(layers)]
    fair = max(sizes)
    assert all(size >= min(fair - 1, room) for size, room in zip(sizes, left, strict=True))
