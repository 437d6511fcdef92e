"""Rows of a prompt in parts: every row once, parts of one size, and two at a time at a worker."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.roster import Roster
from vllm_spac.methods.od_moe.wire import FrameKind, Limits, decode, encode, raw


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
