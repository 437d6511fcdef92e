"""The comparison itself: it reports where tokens diverge, and refuses runs whose tokens may diverge without a fault."""

from __future__ import annotations

import pytest
from engines import Run
from exactness import assert_same_tokens, first_difference

TOKENS = [[1, 2, 3], [4, 5, 6]]
GUARDED = {"guard": {"draft_length": 0}}


def test_where_tokens_part_is_named():
    assert first_difference(TOKENS, [[1, 2, 3], [4, 5, 6]]) is None
    assert (
        first_difference(TOKENS, [[1, 2, 3], [4, 9, 6]])
        == "answers [1] of 2 differ, number 1 from 1 on: [5, 6] instead of [9, 6]"
    )
    assert "number 0 from 2 on: [3] instead of []" in first_difference(TOKENS, [[1, 2], [4, 5, 6]])
    assert first_difference(["ab", "c"], ["ab"]) == "2 answers beside 1"
    with pytest.raises(AssertionError, match="25%.*from 1 on"):
        assert_same_tokens(Run(TOKENS), Run([[1, 2, 3], [4, 9, 6]]), "25%")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_guard_is_compared_in_float32_alone(dtype):
    with pytest.raises(ValueError, match=f"{dtype} rounds by them: use FLOAT32 or guard=off"):
        assert_same_tokens(Run(TOKENS, GUARDED, dtype), Run(TOKENS, {}, dtype))
    assert_same_tokens(Run(TOKENS, GUARDED, "float32"), Run(TOKENS, {}, "float32"))
    assert_same_tokens(Run(TOKENS, {}, dtype), Run(TOKENS, {}, dtype))


def test_dtypes_are_not_mixed():
    with pytest.raises(ValueError, match="float32 beside bfloat16"):
        assert_same_tokens(Run(TOKENS, {}, "float32"), Run(TOKENS))
