"""Rows of a prompt in parts: every row once, and parts of one size."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.methods.od_moe.division import parts


@given(rows=st.integers(1, 4096), part_rows=st.integers(1, 256))
def test_parts_are_all_rows_in_order_and_of_one_size(rows: int, part_rows: int) -> None:
    found = parts(rows, part_rows)
    assert found[0].start == 0 and found[-1].stop == rows
    assert all(one.stop == other.start for one, other in pairwise(found))
    sizes = [part.stop - part.start for part in found]
    assert min(sizes) >= 1 and max(sizes) <= min(part_rows, min(sizes) + 1)
    assert len(found) < rows / part_rows + 1, "no more than needed"
