"""An execution and a simulator that follow the same recorded routing, and what each of them did in every step."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache import transfers
from vllm_spac.cache.host_tier import HostMove, HostTier
from vllm_spac.cache.link import Moved
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, SlotState
from vllm_spac.cache.transfers import Background, HostRows, Mover
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.costs import Costs, Rate
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.recording.trace_file import DRAFT, PREFILL, Trace
from vllm_spac.storage.host import HostStore
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.tools.traces.replayed import Outcome, filling, rows_of_records
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.synthetic import synthetic_trace

SPECS = {"w": TensorSpec((1,), torch.float32)}
VERIFY = 2  # a row's kind
PATIENCE = 30
COSTS = Costs(
    format="spac-profile-1",
    name="round numbers",
    provenance={"how": "calculated", "source": "a test"},
    fast=Rate(bytes_per_second=4),  # an expert of 4 bytes: 1 second
    load=Rate(fixed=1, bytes_per_second=1),
    host=Rate(bytes_per_second=3),
    cpu=Rate(bytes_per_second=2, flops_per_second=4),
    load_at_once=4,
    other=3,
    draft=1,
)


@dataclass(frozen=True)
class Case:
    """What both follow. ``ahead`` are settings of the prefetcher; ``rows``: experts in host memory beside the store."""

    trace: Trace
    slots: int
    policy: str = "lru"
    balancer: str = "none"
    ahead: PrefetchSettings = PrefetchSettings()  # noqa: RUF009  # frozen
    rows: int = 0

    def build_tier(self) -> HostTier | None:
        return HostTier(self.trace.facts.total, self.rows, self.slots, self.build_policy()) if self.rows else None

    def build_policy(self):
        return components.build("policies", self.policy)

    def build_balancer(self) -> Balancer | None:
        facts = self.trace.facts
        knobs = {"layers": facts.layers, "top_k": facts.top_k, "gamma": 2, "expert_bytes": 4, "rates": COSTS.rates(4)}
        return None if self.balancer == "none" else components.build("balancers", self.balancer, **knobs)


@dataclass(frozen=True)
class PredictorInputs:
    """Counters, the owner of each slot and the row of each expert after a step."""

    counters: dict
    owner: list[int]
    row_of: list[int]


def seen(counters, residency, tier: HostTier | None) -> PredictorInputs:
    """Times are left out, bytes are named by the store, and kinds of steps are known from the trace."""
    found = counters.snapshot()
    for name in ("stall_seconds", "cpu_wait_seconds", "steps"):
        del found[name]
    found["bytes"] = sum(found["bytes"].values())
    return PredictorInputs(found, residency.owner.tolist(), [] if tier is None else tier.row_of.tolist())


def mixed_trace(seed: int, steps: int = 30) -> Trace:
    """Steps of prompt rows, verified rows or both, in which some layers do not run."""
    plain = synthetic_trace(
        layers=3, experts=8, top_k=2, steps=steps, drafts=4, skew=0.7, reuse=0.8, expert_bytes=4, seed=seed
    )
    rng = np.random.default_rng(seed)
    kinds = plain.row_kind.reshape(steps, 5).copy()
    for row in kinds:
        prompt = int(rng.choice([0, 0, 0, 2, 5]))
        row[:prompt], row[prompt:], row[prompt : prompt + 1] = PREFILL, DRAFT, VERIFY
    keep = rng.random(plain.records) < 0.95
    return Trace.of(
        plain.facts,
        step_kind=plain.step_kind,
        step_rows=plain.step_rows,
        step_tokens=plain.step_tokens,
        row_kind=kinds.ravel(),
        record_step=plain.record_step[keep],
        record_layer=plain.record_layer[keep],
        ids=plain.ids.reshape(plain.records, 5, 2)[keep].reshape(-1, 2),
    )


# -- the simulator -------------------------------------------------------------------------------------------------


class Watching(SlotsReplay):
    """Keeps what it did in each step."""

    def end_step(self) -> None:
        super().end_step()
        self.residency.check_integrity()
        assert self.residency.pinned == 0
        self.__dict__.setdefault("steps", []).append(seen(self.counters, self.residency, self.tier))


def replay_of(case: Case, at_once: int = COSTS.load_at_once) -> Watching:
    costs, outcome = COSTS.model_copy(update={"load_at_once": at_once}), Outcome("", "", case.slots, 0.0)
    parts = case.build_policy(), case.build_balancer(), case.ahead, case.build_tier()
    return Watching(case.trace, costs, 4, outcome, *parts)


def simulated(case: Case) -> list[PredictorInputs]:
    replay = replay_of(case)
    replay.fill(filling(case.trace, case.slots))
    if replay.tier is not None:
        replay.fill_host(filling(case.trace, min(case.trace.facts.total, case.slots + case.rows)))
    replay.run(rows_of_records(case.trace))
    assert replay.outcome.seconds >= replay.outcome.bound_seconds
    return replay.steps


# -- the execution -------------------------------------------------------------------------------------------------


class Kernel:
    activation, takes_slots, by_expert = "silu", True, False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        return torch.zeros_like(x)


class Idle(CpuExperts):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros_like(x)

    def describe(self) -> str:
        return "nothing"


def execution_of(case: Case, io_threads: int = 4) -> SlotExecution:
    facts = case.trace.facts
    shape = MoEShape(tuple(map(str, range(facts.layers))), facts.experts, facts.top_k, SPECS)
    store = HostStore(shape, "")
    for key in range(shape.total):
        store.put(key, {"w": torch.full((1,), float(key))})
    slots = {"w": torch.full((case.slots, 1), float("nan"))}
    tier = case.build_tier()
    host = None if tier is None else HostRows(tier, HostBlock(SPECS, case.rows, pin=False))
    execution = SlotExecution(ExecutionContext(
        shape, case.slots, case.build_policy(), store, slots,
        io_threads=io_threads, path="store", ahead=case.ahead, host=host,
    ))  # fmt: skip
    if (balancer := case.build_balancer()) is not None:
        execution.attach_balancer(balancer, ExecutorThread(Idle(shape, 1, "silu")))
    return execution


def executed(case: Case, background: type[Background] = Background) -> list[PredictorInputs]:
    before, transfers.Background = transfers.Background, background
    try:
        execution = execution_of(case)
    finally:
        transfers.Background = before
    with contextlib.closing(execution):
        for _ in execution.fill():
            pass
        return list(_steps(case.trace, execution))


def _steps(trace: Trace, execution: SlotExecution) -> Iterator[PredictorInputs]:
    bounds = np.searchsorted(trace.record_step, np.arange(trace.steps + 1)).tolist()
    ids = torch.from_numpy(trace.ids.astype(np.int32))
    for step in range(trace.steps):
        execution.begin_step(step_of(trace.row_kind[trace.row_start[step] : trace.row_start[step + 1]]))
        for record in range(bounds[step], bounds[step + 1]):
            routed = ids[trace.record_start[record] : trace.record_start[record + 1]]
            x, weights = torch.ones(len(routed), 1), torch.ones(routed.shape)
            execution.forward(
                int(trace.record_layer[record]), x, weights, routed, Kernel(), Rows(len(routed), as_routed=True)
            )
        execution.end_forward()
        execution.residency.check_integrity()
        execution.snapshot()  # with a slot for each expert, hits are counted in it
        check_bytes(execution)
        yield seen(execution.counters, execution.residency, execution.host and execution.host.tier)


def check_bytes(execution: SlotExecution) -> None:
    """Every resident expert's slot, and every row, has the bytes of its expert: its key."""
    ready = execution.residency.state == SlotState.READY
    assert (execution.tensors["w"][ready, 0].numpy() == execution.residency.owner[ready]).all()
    if execution.host is not None:
        row_of = execution.host.tier.row_of
        held = np.flatnonzero(row_of != NOWHERE)
        assert (execution.host.tensors["w"][row_of[held], 0].numpy() == held).all()


def step_of(kinds: np.ndarray) -> Step:
    """A prompt's rows, if any, then those of a request that verifies."""
    prompt, rows = int((kinds == PREFILL).sum()), len(kinds)
    prompts = (RequestRows(0, prompt, RowKind.PREFILL),) if prompt else ()
    verifies = (RequestRows(prompt, rows, RowKind.VERIFY, rows - prompt - 1),) if prompt < rows else ()
    return Step(prompts + verifies)


# -- reads ahead whose order is known ------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(1e-4)


class Instant(Background):
    """Every read is over when it has been queued."""

    def fetch(self, loads) -> None:
        super().fetch(loads)
        until(lambda: all(ticket.done.done() for ticket in self._tickets.values()))


class Endless(Background):
    """A read is over when a layer waits for it, and not before."""

    def __init__(self, mover: Mover, threads, device) -> None:
        self.gates: dict[int, threading.Event] = {}
        self.ends = threading.Event()
        perform = mover.perform

        def gated(move: HostMove) -> Moved:
            gate = self.gates[move.key]
            until(lambda: gate.is_set() or self.ends.is_set())
            return perform(move)

        beside = copy.copy(mover)  # loads on demand do not wait
        beside.perform = gated
        super().__init__(beside, threads, device)

    def fetch(self, loads) -> None:
        loads = list(loads)
        self.gates |= {key: threading.Event() for key, _ in loads}
        super().fetch(loads)
        self.settle()

    def wait(self, keys):
        for key in keys:
            self.gates[key].set()
        return super().wait(keys)

    @contextlib.contextmanager
    def paused(self):
        with super().paused():
            yield
        self.settle()

    def settle(self) -> None:
        """Returns when all reads that may be in flight have begun."""
        if self._pauses:
            return
        left = [ticket.done for ticket in self._tickets.values() if not ticket.done.done()]
        until(lambda: sum(job.running() for job in left) == min(self._threads, len(left)))

    def close(self) -> None:
        self.ends.set()
        super().close()
