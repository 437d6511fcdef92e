"""Hints to a worker, over its frames without sockets: whatever arrives, no row is wrong and no slot is lost.

The machine plays an engine and the network: hints wait in a list, from which any may be delivered, in any order, more
than once, damaged, with other sizes, or never. Rows are computed in between, as by an engine's steps.
"""

from __future__ import annotations

import time

import pytest
import torch
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_store import MemoryStore
from msgspec.structs import replace

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.methods.od_moe.pool import ExpertPool
from vllm_spac.methods.od_moe.wire import (
    FrameKind,
    Header,
    Limits,
    Service,
    decode,
    encode,
    hint_payload,
    raw,
    run_payload,
)
from vllm_spac.methods.od_moe.worker import HostedLayers, Worker, _Session

LAYERS, EXPERTS, TOP_K, HIDDEN, EPOCH = 4, 6, 2, 3, 7
MINE = (0, 1, 3)
SHAPE = MoEShape(tuple("abcd"), EXPERTS, TOP_K, {"w": TensorSpec((HIDDEN,), torch.float32)})
FINGERPRINT = "5a" * 16
PEER = b"engine"
number = st.integers(0, 10_000)


def kernel(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: dict) -> torch.Tensor:
    return x + (weights[..., None] * experts["w"][ids.long()]).sum(1)


def content() -> MemoryStore:
    store = MemoryStore(SHAPE, FINGERPRINT)
    for key in range(SHAPE.total):
        store.put(key, {"w": torch.full((HIDDEN,), float(key))})
    return store


class Hints(RuleBasedStateMachine):
    @initialize(slots=st.sampled_from(["2k", "3k", "50%"]), policy=st.sampled_from(["drop", "lru"]))
    def start(self, slots: str, policy: str) -> None:
        knobs = {"slots": slots, "policy": policy, "hidden": HIDDEN, "hints": True}
        service = Service.of(SHAPE, FINGERPRINT, MINE, **knobs)
        store = content()
        self.worker = Worker(bytes(32), lambda _: kernel, lambda *_: store, 1 << 20)
        self.pool = ExpertPool(service, store, kernel, 1 << 20)
        hosted = HostedLayers(service, store, lambda _: kernel, 1 << 20)
        hosted.pool = self.pool
        self.worker._session = _Session(PEER, EPOCH, "engine", hosted)
        self.said: list[tuple[bytes, bytes]] = []
        self.worker._send = lambda peer, message: self.said.append(message) is None  # type: ignore[method-assign]
        self.hints: list[tuple[bytes, bytes]] = []
        self.step, self.layer, self.sequence = 1, -1, 0

    @rule(
        layer=st.sampled_from([*MINE] * 3 + [2, 9]),
        experts=st.lists(st.integers(-1, EXPERTS), min_size=1, max_size=EXPERTS + 1),
        honest=st.sampled_from([True] * 4 + [False]),
        later=st.sampled_from([0] * 4 + [1, -1, 1 << 40]),
    )
    def send(self, layer: int, experts: list[int], honest: bool, later: int) -> None:
        """The engine's predictor names experts; a dishonest one what it likes."""
        self.sequence += 1
        if honest:
            experts = list(dict.fromkeys(expert % EXPERTS for expert in experts))
        step = max(0, self.step + later + (layer <= self.layer))
        header = Header(
            FrameKind.HINT,
            EPOCH,
            step,
            self.sequence,
            layer,
            top_k=len(experts),
            fingerprint=bytes.fromhex(FINGERPRINT),
        )
        self.hints.append(encode(header, hint_payload(experts)))

    @precondition(lambda self: self.hints)
    @rule(which=number, again=st.booleans(), bit=st.none() | st.none() | number)
    def deliver(self, which: int, again: bool, bit: int | None) -> None:
        """A hint arrives, perhaps not for the last time, perhaps with a changed bit; it has no answer."""
        message = list(self.hints[which % len(self.hints)])
        if not again:
            del self.hints[which % len(self.hints)]
        if bit is not None:
            part = bytearray(message[bit % 2])
            part[(bit // 2) % len(part)] ^= 1 << bit % 8
            message[bit % 2] = bytes(part)
        before = self.pool.counts()["hints"]
        self.worker.serve_message([PEER, *message])
        assert self.said == []
        assert bit is None or self.pool.counts()["hints"] == before, "a damaged hint was taken"

    @precondition(lambda self: self.hints)
    @rule(
        which=number,
        change=st.sampled_from(
            [{"epoch": 8}, {"fingerprint": bytes(16)}, {"top_k": 1}, {"top_k": 2}, {"rows": 1}, {"hidden": 3}]
        ),
        more=st.integers(0, 9),
    )
    def deliver_a_lie(self, which: int, change: dict, more: int) -> None:
        """A frame with a right checksum, of another session or other experts, or whose sizes are not those it has."""
        head, payload = self.hints[which % len(self.hints)]
        limits = Limits(experts=EXPERTS + 1)
        header = replace(decode([head, payload], limits).header, **change)
        before = self.pool.counts()["hints"]
        self.worker.serve_message([PEER, *encode(header, payload + bytes(more))])
        assert self.said == []
        truthful = header.top_k * 4 == len(payload) + more and not (
            {"epoch", "fingerprint", "rows", "hidden"} & set(change)
        )
        assert truthful or self.pool.counts()["hints"] == before

    @rule(ahead=st.integers(0, 3), rows=st.integers(1, 4), seed=number, prompts=st.sampled_from([False] * 3 + [True]))
    def run(self, ahead: int, rows: int, seed: int, prompts: bool) -> None:
        """The engine's next layer here, perhaps of a later step: its rows are right."""
        place = ahead + sum(layer <= self.layer for layer in MINE)
        self.step, self.layer = self.step + place // len(MINE), MINE[place % len(MINE)]
        rng = torch.Generator().manual_seed(seed)
        x, weights = torch.randn(rows, HIDDEN, generator=rng), torch.rand(rows, TOP_K, generator=rng)
        ids = torch.randint(0, EXPERTS, (rows, TOP_K), generator=rng).int()
        header = Header(
            FrameKind.RUN, EPOCH, self.step, 1 << 50, self.layer, rows, HIDDEN, TOP_K, x.dtype,
            fingerprint=bytes.fromhex(FINGERPRINT), prompts=prompts,
        )  # fmt: skip
        self.worker.serve_message([PEER, *encode(header, run_payload(x, weights, ids))])
        answer = decode(self.said.pop(), Limits())
        assert answer.header.kind == FrameKind.ROWS, answer.why()
        own = {"w": torch.arange(EXPERTS).add(self.layer * EXPERTS).float()[:, None].expand(-1, HIDDEN)}
        assert raw(answer.rows()) == raw(kernel(x, weights, ids, own))

    @rule()
    def wait(self) -> None:
        """Reads ahead take their time."""
        time.sleep(0.001)

    @invariant()
    def slots_are_whole(self) -> None:
        if hasattr(self, "pool"):
            residency = self.pool._execution.residency
            residency.check_integrity()
            assert residency.pinned == 0

    def teardown(self) -> None:
        if hasattr(self, "worker"):
            self.worker.close()


TestHints = Hints.TestCase
TestHints.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("policy", ["drop", "lru"])
def test_the_machine_can_hit(policy: str) -> None:
    """What is delivered, read and used is a hit: else the machine would test nothing."""
    machine = Hints()
    machine.start("2k", policy)
    machine.run(0, 1, 0, False)
    for _ in range(20):
        machine.send(MINE[(MINE.index(machine.layer) + 1) % 3], list(range(EXPERTS)), True, 0)
        machine.deliver(0, False, None)
        time.sleep(0.01)
        machine.run(0, 1, 0, False)
    counts = machine.pool.counts()
    machine.teardown()
    assert counts["hints"] == 20 and counts["prefetch_hits"] > 0
