"""Rows at workers, over the wire without sockets: whatever is lost, late, repeated or damaged, no row is wrong.

The machine plays workers and the network: requests and answers wait in lists, from which any may be taken, in any
order and more than once; workers end and return under another epoch; time passes only when a rule lets it. Layers
belong to one worker, or their experts are divided among the workers of a group.
"""

from __future__ import annotations

import numpy as np
import torch
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from vllm_spac.methods.od_moe import division
from vllm_spac.methods.od_moe.division import ExpertDivider
from vllm_spac.methods.od_moe.layer_call import Forward, LayerCall
from vllm_spac.methods.od_moe.roster import Patience, Roster
from vllm_spac.methods.od_moe.wire import (
    FrameError,
    FrameKind,
    Header,
    Limits,
    Refusal,
    Speed,
    decode,
    encode,
    raw,
    resident_payload,
    text_payload,
)

WORKERS, LAYERS, EXPERTS, HIDDEN, TOP_K, PART = 4, 4, 8, 3, 3, 2
FINGERPRINT = bytes(range(16))
LIMITS = Limits(rows=16, hidden=HIDDEN, top_k=TOP_K, served=LAYERS * EXPERTS)
number = st.integers(0, 10_000)
rarely = st.sampled_from([False] * 5 + [True])


def truth(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What an honest worker computes: another number for every layer, row, weight and expert, whatever is added first.

    Rows and weights are small integers, so that float32 adds them without rounding.
    """
    assert bool((weights[ids < 0] == 0).all())
    return (x + layer + 1) * (weights * 2.0**ids).sum(dim=1, keepdim=True)


class Network(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 1, 2, 4]))
    def start(self, size: int) -> None:
        self.roster = Roster(WORKERS, FINGERPRINT, lambda: Patience(1.0, 10.0), size)
        mine = [division.layers_of(worker, LAYERS, WORKERS, size) for worker in range(WORKERS)]
        self.divider = None if size == 1 else ExpertDivider(LAYERS, EXPERTS, mine, 0.1)
        self.now, self.epochs, self.step = 0.0, 0, 0
        self.requests: list[tuple[int, tuple[bytes, bytes]]] = []  # to (worker, epoch)
        self.answers: list[tuple[int, tuple[bytes, bytes]]] = []
        self.call: LayerCall | None = None
        self.rows = 0
        for worker in range(WORKERS):
            self.admit(worker)

    def admit(self, worker: int) -> None:
        self.epochs += 1
        self.roster.admit(worker, self.epochs)
        if self.divider is not None:
            self.divider.admit(worker, Speed(1.0, 0.1, 3.0))

    def pump(self) -> None:
        """Does what the client does between two waits."""
        call = self.call
        if call is None:
            return
        for worker, message in call.outgoing(self.now):
            header = decode(message, LIMITS).header
            assert header.epoch == self.roster.epoch(worker) and worker in self.roster.having(call.layer)
            self.requests.append((worker, message))
        for part in call.stranded():
            call.add_part(part, truth(call.layer, *call.rows(part)))
        if call.done:
            assert torch.equal(call.out, self.expected)
            self.rows += len(call.out)
            self.call = None
            shares = self.roster.shares
            computed = sum(share.rows for share in shares.workers) + shares.elsewhere
            assert self.rows <= computed <= self.rows * self.roster.size, "each row was computed once, or by a group"

    @precondition(lambda self: self.call is None)
    @rule(layer=st.integers(0, LAYERS - 1), rows=st.integers(1, 9), seed=number)
    def begin(self, layer: int, rows: int, seed: int) -> None:
        self.step += 1
        rng = torch.Generator().manual_seed(seed)
        x, weights = (torch.randint(1, 50, (rows, n), generator=rng).float() for n in (HIDDEN, TOP_K))
        ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(rows)]).int()
        self.expected = truth(layer, x, weights, ids)
        self.call = LayerCall(self.roster, Forward(self.step), layer, x, weights, ids, PART, self.divider)
        self.pump()

    @precondition(lambda self: self.requests)
    @rule(which=number, again=rarely, how=st.sampled_from(["right"] * 6 + ["fails", "nan", "short", "few"]))
    def compute(self, which: int, again: bool, how: str) -> None:
        """A worker takes a request, perhaps twice, and answers."""
        worker, message = self.requests[which % len(self.requests)]
        if not again:
            del self.requests[which % len(self.requests)]
        frame = decode(message, LIMITS)
        out = truth(frame.header.layer, frame.rows(), *frame.pairs())
        header = replace(frame.header, kind=FrameKind.ROWS, top_k=0)
        if how == "nan":
            out[0, 0] = torch.nan
        if how == "short":
            header, out = replace(header, hidden=HIDDEN - 1), out[:, 1:]
        resident = np.zeros(0, dtype=bool)
        if self.divider is not None:
            resident = np.random.default_rng(which).random(self.divider.served(worker) - 8 * (how == "few")) < 0.5
        answer = encode(replace(header, top_k=len(resident)), raw(out) + resident_payload(resident))
        if how == "fails":
            repeated = (header.epoch, header.step, header.sequence, header.layer)
            answer = encode(
                Header(FrameKind.FAILED, *repeated, fingerprint=FINGERPRINT), text_payload(Refusal("full disk"))
            )
        self.answers.append((worker, answer))

    @precondition(lambda self: self.requests)
    @rule(order=st.lists(number, min_size=1, max_size=6))
    def serve(self, order: list[int]) -> None:
        """Some requests are computed and answered, in any order, and nothing happens to them."""
        for which in order:
            if self.requests:
                self.compute(which, False, "right")
                self.deliver(len(self.answers) - 1, False, None, False)

    def arrives(self, worker: int, message: list[bytes] | tuple[bytes, bytes]) -> bool:
        """Whether the layer takes a message, as the client hands it over."""
        assert self.call is not None
        try:
            return self.call.incoming(worker, decode(message, LIMITS), self.now)
        except FrameError:
            return False

    @precondition(lambda self: self.answers)
    @rule(which=number, again=rarely, bit=st.none() | st.none() | number, other=rarely)
    def deliver(self, which: int, again: bool, bit: int | None, other: bool) -> None:
        """An answer arrives: perhaps not for the last time, damaged, or from another worker than was asked."""
        worker, parts = self.answers[which % len(self.answers)]
        if not again:
            del self.answers[which % len(self.answers)]
        message = list(parts)
        if bit is not None:
            part = bytearray(message[bit % 2])
            part[(bit // 2) % len(part)] ^= 1 << bit % 8
            message[bit % 2] = bytes(part)
        if self.call is not None:
            counted = self.arrives((worker + other) % WORKERS, message)
            assert not (counted and (other or bit is not None))
            self.pump()

    @precondition(lambda self: self.answers)
    @rule(which=number, field=st.sampled_from(["epoch", "step", "layer", "sequence", "fingerprint"]))
    def deliver_for_something_else(self, which: int, field: str) -> None:
        """A whole frame, with a right checksum, of another session, step, layer or request, or of other experts."""
        worker, parts = self.answers[which % len(self.answers)]
        frame = decode(parts, LIMITS)
        value = bytes(16) if field == "fingerprint" else getattr(frame.header, field) + 1000
        if self.call is not None:
            message = encode(replace(frame.header, **{field: value}), bytes(frame.payload))
            assert not self.arrives(worker, message)
            self.pump()

    @rule(worker=st.integers(0, WORKERS - 1), answers_too=st.booleans(), really=rarely)
    def end(self, worker: int, answers_too: bool, really: bool) -> None:
        """A worker's process ends; what it answered before may still arrive."""
        if not really:
            return
        self.requests = [each for each in self.requests if each[0] != worker]
        if answers_too:
            self.answers = [each for each in self.answers if each[0] != worker]
        if self.call is None:
            self.roster.remove(worker, "it ended")
        else:
            self.call.remove(worker, "it ended")
            self.pump()

    @rule()
    def come_back(self) -> None:
        for worker in range(WORKERS):
            if self.roster.epoch(worker) is None:
                self.admit(worker)
                self.pump()

    @rule(seconds=st.sampled_from([0.1] * 5 + [1.1, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.call is not None:
            self.call.cancel_late(self.now)
            self.pump()

    @invariant()
    def an_open_layer_waits_for_something(self) -> None:
        assert getattr(self, "call", None) is None or self.call.deadline() is not None

    def teardown(self) -> None:
        for _ in range(100):
            if getattr(self, "call", None) is None:
                return
            self.serve([0] * len(self.requests))
            self.wait(100.0)
        raise AssertionError("a layer never ends")


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
