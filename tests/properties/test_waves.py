"""Waves of rows: each fits the slots, and they share experts."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.execution import waves


def drawn(rows: int, experts: int, top_k: int, seed: int) -> np.ndarray:
    """Routing of ``rows``, int32 [rows, top_k], some experts more popular than others."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(experts, 2.0)) + 1e-3
    chosen = [rng.choice(experts, top_k, replace=False, p=popular / popular.sum()) for _ in range(rows)]
    return np.array(chosen, dtype=np.int32).reshape(rows, top_k)


@settings(max_examples=examples(200), deadline=None)
@given(
    rows=st.integers(0, 60),
    experts=st.integers(2, 12),
    top_k=st.integers(1, 2),
    more=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_row_is_in_one_wave_that_fits_and_takes_all_it_can(rows, experts, top_k, more, seed):
    ids = drawn(rows, experts, top_k, seed)
    slots = min(top_k + more, experts)
    found = [np.arange(rows)[wave] for wave in waves.row_waves(ids, slots, experts)]
    assert sorted(np.concatenate(found).tolist() if found else []) == list(range(rows))
    if rows and len(np.unique(ids)) <= slots:
        assert len(found) == 1
    left = np.arange(rows)
    for wave in found:
        assert len(wave) and (np.diff(wave) > 0).all()
        held = set(ids[wave].ravel().tolist())
        assert len(held) <= slots
        left = np.setdiff1d(left, wave)
        assert all(len(held | set(row)) > slots for row in ids[left].tolist()), "another row would have fitted"


def test_a_row_that_no_wave_can_hold_is_a_mistake():
    with pytest.raises(AssertionError, match="more experts than there are slots"):
        list(waves.row_waves(np.arange(8, dtype=np.int32).reshape(2, 4), 3, 8))


@given(layers=st.integers(1, 9), experts=st.integers(1, 20), share=st.floats(0, 1))
def test_slots_are_filled_with_an_equal_share_of_each_layer(layers, experts, share):
    slots = round(share * layers * experts)
    filled = waves.filled_experts(layers, experts, slots)
    sizes = [len(part) for part in filled]
    assert len(filled) == layers and sum(sizes) == slots and max(sizes) - min(sizes) <= 1
    assert all(keys == list(range(n * experts, n * experts + len(keys))) for n, keys in enumerate(filled))


@given(layers=st.integers(1, 9), experts=st.integers(1, 20), share=st.floats(0, 1), data=st.data())
def test_slots_are_filled_beside_experts_that_have_settled(layers, experts, share, data):
    """All slots are taken, none by an expert that has one for good, and the others by the lowest of each layer."""
    total = layers * experts
    slots = round(share * total)
    settled = data.draw(st.sets(st.integers(0, total - 1), max_size=slots))
    filled = waves.filled_experts(layers, experts, slots, settled)
    assert sum(map(len, filled)) == slots - len(settled) and settled.isdisjoint(key for part in filled for key in part)
    for layer, keys in enumerate(filled):
        left = [key for key in range(layer * experts, (layer + 1) * experts) if key not in settled]
        assert keys == left[: len(keys)]
