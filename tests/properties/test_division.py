"""Rows of a prompt in parts: every row once, parts of one size, and two at a time at a worker."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_spac.methods.od_moe.division import parts
from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.roster import Roster
from vllm_spac.methods.od_moe.wire import FrameKind, Limits, decode, encode, raw


@given(rows=st.integers(1, 4096), part_rows=st.integers(1, 256))
def test_parts_are_all_rows_in_order_and_of_one_size(rows: int, part_rows: int) -> None:
    found = parts(rows, part_rows)
    assert found[0].start == 0 and found[-1].stop == rows
    assert all(one.stop == other.start for one, other in pairwise(found))
    sizes = [part.stop - part.start for part in found]
    assert min(sizes) >= 1 and max(sizes) <= min(part_rows, min(sizes) + 1)
    assert len(found) < rows / part_rows + 1, "no more than needed"


def test_a_worker_has_two_parts_at_a_time() -> None:
    """One travels while the other is computed."""
    roster = Roster(1, bytes(16))
    roster.admit(0, epoch=1)
    x, ids = torch.arange(10.0).view(5, 2), torch.zeros(5, 1, dtype=torch.int32)
    call = LayerCall(roster, Forward(1, prompts=True), 0, x, torch.ones(5, 1), ids, part_rows=1)
    sent = [message for _, message in call.outgoing(0.0)]
    assert len(sent) == 2 and call.outgoing(0.0) == []
    for left in (1, 1, 1, 0, 0):
        frame = decode(sent.pop(0), Limits())
        answer = encode(replace(frame.header, kind=FrameKind.ROWS, top_k=0), raw(2 * frame.rows()))
        assert call.incoming(0, decode(answer, Limits()), 1.0)
        more = [message for _, message in call.outgoing(1.0)]
        assert len(more) == left
        sent += more
    assert call.done and torch.equal(call.out, 2 * x)
