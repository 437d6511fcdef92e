"""The CPU's share of layers whose loads the device chooses: each pair is computed once, whatever the thread does."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from looped_experts import Looped, LoopedServer
from replay import Graph
from test_execution import EXPERTS, LAYERS, TOP_K, D, Pool, packed
from torch import Tensor
from vllm_spac.kernels.reference import mailbox as twins
from vllm_spac.kernels.reference.admit import admit
from vllm_spac.kernels.types import (
    ADMITTED,
    COMPUTED,
    HIT,
    LATE,
    STREAMED,
    UNUSED,
    Division,
    Experts,
    Mail,
    Offers,
    Request,
)

from vllm_spac import components
from vllm_spac.core import Rates, RequestRows, RowKind, Step
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import check_same
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.device import cpu_share
from vllm_spac.execution.device.mailbox import Mailbox

RATES = Rates(fast=1e-5, stream=2e-4, cpu=1e-4, cpu_row=1e-6)
LONG = 20_000_000_000  # nanoseconds: no machine is so busy
SHORT = 5_000_000


class Watched(Looped):
    """Computes as told: after a gate has opened, or not at all."""

    def __init__(self, layout) -> None:
        super().__init__(layout, 1, "silu")
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.rows = self.calls = 0

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        self.calls += 1
        self.rows += int((weights != 0).sum())
        return super().run(x, weights, ids, experts)


class Shared(Pool):
    """A pool whose CPU takes a share; its results are compared up to rounding."""

    def __init__(self, slots: int, balancer: str = "fixed", layout=None, count: int = 2, **options) -> None:
        super().__init__(slots, layout, **options)
        self.watched = Watched(self.shape)
        knobs = {"layers": LAYERS, "top_k": TOP_K, "expert_bytes": self.shape.expert_bytes}
        knobs |= {"count": count} if balancer == "fixed" else {"rates": RATES}
        self.attach_balancer(components.build("balancers", balancer, **knobs), ExecutorThread(self.watched))

    def step(self, rng: torch.Generator, rows: int = 3, kind: RowKind = RowKind.DECODE) -> int:
        """Runs a step; returns the distinct experts that it used."""
        self.begin_step(Step((RequestRows(0, rows, kind),)))
        self.admission.check_integrity()
        used = sum(self.layer(layer, rng, rows) for layer in range(LAYERS))
        self.end_forward()
        return used

    def layer(self, layer: int, rng: torch.Generator, rows: int) -> int:
        x = torch.randn(rows, D, generator=rng).to(torch.bfloat16 if self.shape.packed else torch.float32)
        weights = torch.rand(rows, TOP_K, generator=rng)
        ids = torch.randint(-1, EXPERTS, (rows, TOP_K), generator=rng)
        out = self.run(layer, x, weights, ids, "silu", torch.full_like(x, float("nan")))
        expected = self.expected(layer, x, weights, ids, "silu")
        assert bool(out.any()) == bool(expected.any())
        if expected.any():  # else no pair counts
            check_same(out, expected, x.dtype, D, "the CPU's share")
        return len(set(ids.flatten().tolist()) - {-1})


@pytest.fixture
def patient(monkeypatch) -> Callable[[int], None]:
    return lambda nanoseconds: monkeypatch.setattr(cpu_share, "PATIENCE", nanoseconds)


@pytest.fixture
def shared(patient) -> Iterator[Callable[..., Shared]]:
    pools: list[Shared] = []
    patient(LONG)
    yield lambda *args, **options: pools.append(Shared(*args, **options)) or pools[-1]
    for pool in pools:
        pool.watched.gate.set()
        pool.close()


# -- what the CPU takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balancer", ["fixed", "waterfill"])
@pytest.mark.parametrize("slots", [TOP_K, 7, LAYERS * EXPERTS - 1])
def test_layers_give_the_same_and_the_CPU_computes_some(shared, balancer: str, slots: int) -> None:
    pool, rng = shared(slots, balancer, policy="reuse"), torch.Generator().manual_seed(0)
    used = sum(pool.step(rng, 1 + number % 5) for number in range(20))
    stats = pool.snapshot()
    assert stats["hits"] + stats["misses"] + stats["cpu_experts"] == used
    assert stats["cpu_late"] == 0 and stats["cpu_rows"] == pool.watched.rows >= stats["cpu_experts"]
    assert stats["cpu_experts"] > 0 or slots == LAYERS * EXPERTS - 1
    streamed = stats["misses"] - stats["loads"]
    assert stats["bytes"].get("host streamed", 0) == streamed * pool.shape.expert_bytes


def test_packed_experts(shared) -> None:
    pool, rng = shared(7, layout=packed(), policy="reuse"), torch.Generator().manual_seed(0)
    for _ in range(8):
        pool.step(rng)
    assert pool.snapshot()["cpu_experts"] > 0


@pytest.mark.parametrize("kind", [RowKind.PREFILL, RowKind.VERIFY])
@pytest.mark.parametrize("rows", [1, 32, 33])
def test_prompts_and_many_rows_stay_on_the_device(shared, rows: int, kind: RowKind) -> None:
    pool, rng = shared(TOP_K, count=EXPERTS, policy="reuse"), torch.Generator().manual_seed(0)
    assert pool.launches.cpu.rows == cpu_share.MOST_ROWS == 32
    for _ in range(4):
        pool.step(rng, rows, kind)
    assert (pool.snapshot()["cpu_experts"] > 0) == (rows <= 32 and kind == RowKind.VERIFY)


def test_what_the_balancer_says_by_the_number_that_is_missing() -> None:
    knobs = {"layers": 2, "top_k": 2}
    assert cpu_share.shares_of(components.build("balancers", "fixed", count=2, **knobs), 4) == [0, 1, 2, 2, 2]
    waterfill = components.build("balancers", "waterfill", rates=RATES, **knobs)  # a load is worth two computations
    assert cpu_share.shares_of(waterfill, 6) == [0, 1, 1, 2, 3, 3, 4]
    threshold = components.build("balancers", "threshold", rates=RATES, **knobs)
    with pytest.raises(UnsupportedError, match="Threshold divides a layer on the host; use .*auto"):
        cpu_share.shares_of(threshold, 4)


def test_the_thread_sleeps_in_steps_that_miss_too_few_experts(shared, monkeypatch) -> None:
    """One row misses TOP_K experts at most; the CPU takes one only of more."""
    monkeypatch.setattr(cpu_share, "shares_of", lambda balancer, n: [max(0, m - TOP_K) for m in range(n + 1)])
    pool, rng, woken = shared(TOP_K, policy="reuse"), torch.Generator().manual_seed(0), []
    pool.step(rng, 1)
    wake = pool.launches.cpu._box.wake
    monkeypatch.setattr(pool.launches.cpu._box, "wake", lambda: woken.append(1) or wake())
    for _ in range(4):
        pool.step(rng, 1)
    assert not woken and pool.snapshot()["cpu_experts"] == 0
    for _ in range(4):
        pool.step(rng, 5)
    assert woken and pool.snapshot()["cpu_experts"] > 0


def test_an_executor_that_needs_layers_to_stop_is_refused() -> None:
    pool = Pool(TOP_K)
    executor = Watched(pool.shape)
    executor.exclusive = True
    thread = ExecutorThread(executor)
    with pytest.raises(UnsupportedError, match="use --spac-cpu-kernel simd"):
        pool.attach_balancer(components.build("balancers", "fixed", layers=LAYERS, top_k=TOP_K), thread)
    thread.close()
    pool.close()


@st.composite
def layers(draw) -> dict:
    n, k, rows = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    of = lambda values, size: draw(st.lists(values, min_size=size, max_size=size))  # noqa: E731
    ids = torch.tensor(of(st.integers(-1, n), rows * k), dtype=torch.int32).view(rows, k)
    weights = torch.tensor(of(st.sampled_from([0.0, 0.5, 1.0]), rows * k)).view(rows, k)
    shares = [min(m, share) for m, share in enumerate(of(st.integers(0, n), n + 1))]
    return {
        "ids": ids,
        "weights": weights,
        "layer": draw(st.integers(0, 1)),
        "hits": of(st.booleans(), n),
        "kept": of(st.sampled_from([0.0, 1.0, 2.0]), n),
        "used": of(st.sampled_from([0.0, 1.0, float("inf")]), 2 * n),
        "shares": shares,
        "live": draw(st.integers(0, rows)) * k,
        "open": draw(st.booleans()),
    }


@settings(max_examples=examples(300))
@given(layers())
def test_each_pair_is_the_devices_or_the_CPUs(case: dict) -> None:
    ids, weights, layer, live = case["ids"], case["weights"], case["layer"], case["live"]
    (rows, k), n = ids.shape, len(case["shares"]) - 1
    division, mail = memory(rows, k, case["shares"])
    division.pairs.fill_(live if case["open"] else 0)
    flat = ids.flatten()[:live].tolist()
    lively = [e for e, w in zip(flat, weights.flatten()[:live].tolist(), strict=True) if 0 <= e < n and w]
    experts, offers = offering(layer, case["hits"], case["kept"], case["used"])
    sources, counts = (torch.full((2 * n,), value, dtype=torch.int32) for value in (UNUSED, 0))
    missing = {e for e in lively if experts.slot_of[layer * n + e] < 0}
    x, used = torch.arange(rows * 2.0).view(rows, 2), torch.tensor(case["used"])
    request = Request(x, torch.tensor([live], dtype=torch.int32), counts.clone(), division, mail)
    copies = torch.zeros(1 + 2 * n, dtype=torch.int32)
    admit(ids, weights, layer * n, experts, offers, counts, sources, copies, request.live, request)

    kept, left = division.kept[:rows], division.left[:rows]
    assert torch.equal(kept + left, weights) and not (kept * left).any(), "one of both computes a pair"
    assert request.counts[layer * n : layer * n + n].tolist() == [lively.count(e) for e in range(n)]
    here = slice(layer * n, layer * n + n)
    taken = (sources[here] == COMPUTED).nonzero().flatten().tolist()
    assert len(taken) == (case["shares"][len(missing)] if case["open"] and live else 0)
    rank = {e: (lively.count(e), float(used[layer * n + e])) for e in missing}
    assert all(rank[a] <= rank[b] for a in taken for b in missing - set(taken)), "few rows, then cold ones"
    got = {int(key) - layer * n for key in copies[1 : 1 + int(copies[0])]}
    assert got <= missing - set(taken), "what the CPU computes gets no slot"
    expected = {e: STREAMED for e in missing} | dict.fromkeys(taken, COMPUTED) | dict.fromkeys(got, ADMITTED)
    assert sources[here].tolist() == [expected.get(e, HIT if e in lively else UNUSED) for e in range(n)]
    pairs = [(at // k, flat[at]) for at in range(live) if left.flatten()[at]]
    assert {expert for _, expert in pairs} == set(taken)
    assert (int(division.number), int(mail.asked)) == ((1, 1) if taken else (0, 0))
    if taken:
        assert mail.head.tolist() == [layer, live // k] and torch.equal(mail.x[: live // k], x[: live // k])
        assert torch.equal(mail.weights[: live // k], left[: live // k])
        asked = (mail.ids[: live // k] >= 0).nonzero().tolist()
        assert [(row, int(mail.ids[row, slot])) for row, slot in asked] == pairs


def offering(layer: int, hits: list[bool], kept: list[float], used: list[float]) -> tuple[Experts, Offers]:
    """Of two layers, the experts of this one that are hits have slots, and all of the other, whose are offered."""
    n, (integers, addresses) = len(hits), ({"dtype": torch.int32}, torch.zeros(1, 2 * len(hits), dtype=torch.int64))
    owner = [layer * n + e for e in range(n) if hits[e]] + [(1 - layer) * n + e for e in range(n)]
    slot_of = torch.full((2 * n,), -1, **integers)
    slot_of[owner] = torch.arange(len(owner), **integers)
    offered = torch.tensor([[sum(hits) + e for e in range(n)], [(1 - layer) * n + e for e in range(n)]], **integers)
    places = torch.ones(1, len(owner), dtype=torch.int64)
    experts = Experts(slot_of, torch.tensor(owner, **integers), addresses.clone(), addresses, places)
    state = torch.tensor([0, n], **integers)
    return experts, Offers(state, *offered, torch.tensor(kept).sort().values, torch.tensor(used))


def memory(rows: int, k: int, shares: list[int], d: int = 2) -> tuple[Division, Mail]:
    box = Mailbox(rows, k, d, torch.float32, torch.device("cpu"))
    number, state = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    both, table = (torch.zeros(rows, k) for _ in range(2)), torch.tensor(shares, dtype=torch.int32)
    pairs, late = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return Division(number, pairs, state, table, *both, late), box.mail


def test_a_step_that_is_replayed_divides_its_own_rows(shared, monkeypatch) -> None:
    """One capture, many steps: nothing of the division is decided by the host while a layer runs."""
    pool, rng = shared(7, count=EXPERTS, policy="reuse"), torch.Generator().manual_seed(0)
    rows, graph = 4, Graph()
    kernels, mail = pool.launches.kernels, pool.launches.cpu._kernels
    monkeypatch.setattr(pool.launches, "kernels", kernels._replace(grouped_gemm=graph.kernel(kernels.grouped_gemm)))
    ours = kernels._replace(admit=graph.kernel(kernels.admit))
    monkeypatch.setattr(pool.admission, "_kernels", ours)
    monkeypatch.setattr(pool.launches.cpu, "_kernels", type(mail)(*map(graph.kernel, mail)))
    monkeypatch.setattr("vllm_spac.execution.device.pointers_execution.capturing", lambda tensor: graph.capturing)
    x, out = torch.zeros(rows, D), torch.zeros(LAYERS, rows, D)
    weights, ids = torch.zeros(rows, TOP_K), torch.zeros(LAYERS, rows, TOP_K, dtype=torch.int32)

    def forward() -> None:
        for layer in range(LAYERS):
            pool.run(layer, x, weights, ids[layer], "silu", out[layer])

    forward()
    with graph:
        forward()
    assert pool.watched.calls == 0
    for number in range(20):
        real = 1 + number % rows
        for tensor in (x, weights):
            tensor.copy_(torch.rand(tensor.shape, generator=rng))
        ids.copy_(torch.randint(0, EXPERTS, ids.shape, generator=rng))
        pool.begin_step(Step((RequestRows(0, real, RowKind.DECODE),)))
        graph.replay()
        pool.end_forward()
        for layer in range(LAYERS):
            expected = pool.expected(layer, x, weights, ids[layer], "silu")
            torch.testing.assert_close(out[layer][:real], expected[:real], rtol=1e-5, atol=1e-5)
    stats = pool.snapshot()
    assert stats["cpu_experts"] > 20 and stats["cpu_rows"] == pool.watched.rows and stats["cpu_late"] == 0


# -- threads that fail ------------------------------------------------------------------------------------------------


def run(pool: Shared, steps: int) -> dict[str, int]:
    """Returns what these steps counted."""
    rng, before = torch.Generator().manual_seed(0), pool.snapshot()
    used = sum(pool.step(rng) for _ in range(steps))
    after = pool.snapshot()
    found = {name: after[name] - before[name] for name in ("hits", "misses", "cpu_experts", "cpu_late")}
    assert found["hits"] + found["misses"] + found["cpu_experts"] == used, "each expert is counted once"
    return found


def test_a_thread_that_never_answers_costs_a_wait_a_step_and_fewer_and_fewer(shared, patient, monkeypatch, caplog):
    """Not one a layer; and the log says once that much is late."""
    patient(SHORT)
    monkeypatch.setattr(cpu_share, "LONGEST", 8)
    pool = shared(TOP_K, count=EXPERTS, policy="reuse")
    pool.watched.gate.clear()
    waits: list[int] = []
    await_answer = pool.launches.cpu._kernels.wait_for_answer

    def counted(ids, layer, sources, division, mail, patience) -> None:
        waits.append(int(division.state[0]))
        await_answer(ids, layer, sources, division, mail, patience)

    pool.launches.cpu._kernels = pool.launches.cpu._kernels._replace(wait_for_answer=counted)
    found = run(pool, 40)
    assert found["cpu_experts"] == 0 < found["cpu_late"]
    assert len(waits) == 40 * LAYERS and 4 <= sum(waits) <= 8, "after 1, 2, 4, 8, 8 ... steps without"
    said = [record for record in caplog.records if "ms late" in record.message]
    assert len(said) == 1 and said[0].levelno == logging.WARNING and "--spac-cpu-experts" in said[0].message
    pool.watched.gate.set()
    patient(LONG)
    assert run(pool, 20)["cpu_experts"] > 0, "it answers again, and takes part again"


def test_a_slow_thread_is_late_and_its_old_results_count_for_nothing(shared, patient) -> None:
    patient(SHORT)
    pool, gone, compute = shared(TOP_K, count=EXPERTS, policy="reuse"), threading.Event(), Looped.run
    kernels, decides = pool.launches.cpu._kernels, pool.admission._kernels

    def admits(*given, **named) -> None:
        gone.clear()
        decides.admit(*given, **named)

    def await_answer(ids, layer, sources, division, *given) -> None:
        kernels.wait_for_answer(ids, layer, sources, division, *given)
        if division.state[0]:
            gone.set()

    class Slow(Looped):
        def run(self, *given) -> Tensor:
            gone.wait(60)  # until nobody waits
            return compute(self, *given) + 1e6

    pool.launches.cpu._kernels = kernels._replace(wait_for_answer=await_answer)
    pool.admission._kernels = decides._replace(admit=admits)
    pool.watched.__class__ = Slow
    found = run(pool, 15)
    assert found["cpu_late"] > 0 == found["cpu_experts"]
    gone.set()


@pytest.mark.parametrize("off", [-1, 1, 5])
def test_a_wrong_number_is_no_answer(shared, patient, monkeypatch, off: int) -> None:
    patient(SHORT)
    monkeypatch.setattr(cpu_share, "LONGEST", 1)  # it is asked in every other step

    def answer(self: LoopedServer, number: int) -> None:
        self.mail.results.fill_(1e6)
        self.mail.answered[0] = number + off

    monkeypatch.setattr(LoopedServer, "answer", answer)
    pool = shared(TOP_K, count=EXPERTS, policy="reuse")
    found = run(pool, 10)
    assert found["cpu_late"] > 0 == found["cpu_experts"]


def test_an_error_of_the_executor_is_told_and_the_device_computes_all(shared, patient, caplog) -> None:
    patient(SHORT)
    pool = shared(TOP_K, count=EXPERTS, policy="reuse")
    patient(LONG)
    assert run(pool, 3)["cpu_experts"] > 0
    patient(SHORT)
    pool.watched.error = ValueError("the CPU is on holiday")
    assert run(pool, 4)["cpu_late"] > 0
    assert run(pool, 10)["cpu_late"] == 0, "it is not asked again"
    said = [record for record in caplog.records if "no experts any more" in record.message]
    assert len(said) == 1 and "the CPU is on holiday" in said[0].message and said[0].exc_info is not None


def test_a_pool_closes_while_its_thread_computes(patient) -> None:
    patient(SHORT)
    pool = Shared(TOP_K, count=EXPERTS, policy="reuse")
    pool.watched.gate.clear()
    pool.step(torch.Generator().manual_seed(0))
    threading.Timer(0.1, pool.watched.gate.set).start()
    pool.close()
    assert pool.watched.calls <= 1


FORGOTTEN = """
import torch
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.cpu_kernels.simd import Simd
from vllm_spac.execution.device.mailbox import Mailbox
experts = {"w13_weight": torch.zeros(2, 4, 2), "w2_weight": torch.zeros(2, 2, 2)}
box = Mailbox(2, 1, 2, torch.float32, torch.device("cpu"))
box.start(Simd(MoEShape(("a",), 2, 1, {}), 2, "silu"), [experts])
box.mail.asked[0] = 1
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_process_ends_though_nobody_closes_the_threads() -> None:
    assert subprocess.run([sys.executable, "-c", FORGOTTEN], timeout=120, check=False).returncode == 0


def test_late_is_told_from_computed(shared) -> None:
    """What the wait says of the experts of its own layer, and of no other."""
    division, mail = memory(1, 2, [0, 1, 2])
    division.state[0], division.number[0], division.pairs[0] = 1, 3, 2
    division.left[:] = torch.tensor([[0.5, 0.0]])
    sources = torch.tensor([COMPUTED, HIT, COMPUTED, STREAMED], dtype=torch.int32)
    ids = torch.tensor([[0, 1]])
    twins.wait_for_answer(ids, 1, sources, division, mail, 1000)
    assert sources.tolist() == [COMPUTED, HIT, LATE, STREAMED] and division.state.tolist() == [1, 0]
    assert division.pairs.item() == 0 and division.late.item() == 2
    mail.answered[0] = 3
    twins.wait_for_answer(ids, 0, sources, division, mail, 1000)
    assert sources.tolist()[0] == COMPUTED and division.state[1] == 1 and division.late.item() == 0
