"""Experts of a layer that forwards with many rows use: named when such names were right, and not before."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_spac.cache.loader import LayerUse

LAYERS, EXPERTS, TOP_K = 3, 20, 4
ROWS = 40
EVERY = np.arange(EXPERTS)
MISSING = np.ones(EXPERTS, dtype=bool)


def forward(use: LayerUse, used: np.ndarray, rows: int = ROWS, missing: np.ndarray = MISSING) -> list[list[int]]:
    """Runs all layers; returns what was named of each but the first before it ran."""
    named = []
    for layer in range(LAYERS):
        use.observe(layer, rows, used)
        if layer + 1 < LAYERS:
            named.append(use.name(layer + 1, rows, missing).tolist())
    return named


def test_what_every_forward_uses_is_named_after_two() -> None:
    use = LayerUse(LAYERS, EXPERTS, TOP_K)
    assert forward(use, EVERY) == [[], []], "nothing is known"
    assert forward(use, EVERY) == [[], EVERY.tolist()], "the names of the first layers have been right"
    assert forward(use, EVERY) == [EVERY.tolist()] * 2


def test_only_what_is_missing_is_named_and_the_likeliest_first() -> None:
    use = LayerUse(LAYERS, EXPERTS, TOP_K)
    for _ in range(6):
        forward(use, EVERY)
    use.observe(1, ROWS, EVERY[5:])  # 0 to 4 were not used now, and were always before
    named = use.name(1, ROWS, np.isin(EVERY, [3, 9, 7])).tolist()
    assert named == [7, 9], "half of the weight is that of the last forward"
    use.observe(1, ROWS, EVERY)
    assert use.name(1, ROWS, np.isin(EVERY, [3, 9, 7])).tolist() == [7, 9, 3]


def test_names_that_are_wrong_are_not_given_any_more_until_they_would_be_right() -> None:
    use, rng = LayerUse(LAYERS, EXPERTS, TOP_K), np.random.default_rng(0)
    for _ in range(3):
        forward(use, EVERY)
    assert forward(use, EVERY)[0]
    for _ in range(8):
        found = forward(use, rng.choice(EVERY, EXPERTS // 2, replace=False))
    assert found == [[], []], "each forward uses another half"
    for _ in range(80):
        found = forward(use, EVERY)
    assert found == [EVERY.tolist()] * 2


@pytest.mark.parametrize(("wrong", "given"), [(0, True), (1, True), (2, False)])
def test_nineteen_of_twenty_must_be_right(wrong: int, given: bool) -> None:
    use = LayerUse(1, EXPERTS, TOP_K)
    use.observe(0, ROWS, EVERY)
    use.name(0, ROWS, MISSING)
    use.observe(0, ROWS, EVERY[wrong:])
    use.observe(0, ROWS, EVERY)  # nothing was named
    assert bool(len(use.name(0, ROWS, MISSING))) == given


def test_forwards_of_other_sizes_are_judged_apart() -> None:
    use = LayerUse(LAYERS, EXPERTS, TOP_K)
    for _ in range(3):
        forward(use, EVERY)
    assert use.name(1, ROWS, MISSING).tolist() == use.name(1, 60, MISSING).tolist() == EVERY.tolist()
    assert use.name(1, 64, MISSING).tolist() == use.name(1, 31, MISSING).tolist() == []
