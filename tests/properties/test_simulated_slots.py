"""The simulator does what an execution does: the same counters and the same expert in each slot, after every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from driven import COSTS, Case, Endless, Instant, executed, execution_of, mixed_trace, replay_of, simulated
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_spac import components
from vllm_spac.cache import loader
from vllm_spac.cache.link import Moved
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.decisions.predictors.oracle import Oracle
from vllm_spac.recording.metrics import Counters
from vllm_spac.tools.traces.replayed import rows_of_records
from vllm_spac.tools.traces.virtual_link import Flow, VirtualLink

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
POLICIES = components.serving("policies")
SEEDS = st.integers(0, 1 << 16)


def assert_same(found: list, expected: list) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == theirs, f"step {step}"


# What the CPU computed is admitted when a read ahead has ended: as the reads ahead below, which end when they should.
WITHOUT_READS = [f"{name}@admit=False" if name == "waterfill" else name for name in components.names("balancers")]


@pytest.mark.parametrize("balancer", WITHOUT_READS)
@pytest.mark.parametrize("policy", POLICIES)
@given(SEEDS, st.integers(2, 6) | st.integers(2, 24))
@settings(max_examples=examples(8), **BUSY)
def test_on_demand(policy: str, balancer: str, seed: int, slots: int) -> None:
    case = Case(mixed_trace(seed), slots, policy, balancer)
    assert_same(simulated(case), executed(case))


@pytest.mark.parametrize("balancer", ["none", "waterfill@admit=False"])
@pytest.mark.parametrize("policy", POLICIES)
@given(SEEDS, st.integers(2, 8), st.sampled_from([1, 3, 8, 16, 24]))
@settings(max_examples=examples(8), **BUSY)
def test_with_host_memory_before_the_store(policy: str, balancer: str, seed: int, slots: int, rows: int) -> None:
    case = Case(mixed_trace(seed), slots, policy, balancer, rows=rows)
    found = simulated(case)
    assert_same(found, executed(case))
    assert rows < 8 or found[-1].counters["host_loads"] > 0


def test_cases_have_what_can_differ() -> None:
    """Waves, experts that are loaded twice in a layer, and experts on both sides."""
    for trace in map(mixed_trace, range(3)):
        few, more = (simulated(Case(trace, slots, "reuse", "fixed"))[-1].counters for slots in (2, 3))
        assert few["cpu_rows"] > few["cpu_experts"] > 0 and more["hits"] > 0
        assert few["loads"] > few["misses"] and few["waves"] > trace.records


AHEAD = st.builds(
    lambda depth, threshold, upper: PrefetchSettings(
        prefetch="utility", depth=depth, threshold=threshold, background=1, options={"gamma": 2, "upper": upper}
    ),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4]),
)
BALANCERS = st.sampled_from(["none", "threshold", "waterfill"])


@given(SEEDS, st.integers(2, 23), st.sampled_from(POLICIES), BALANCERS, AHEAD)
@settings(max_examples=examples(60), **BUSY)
def test_reads_ahead_that_never_end_unless_waited_for(seed: int, slots: int, policy: str, balancer: str, ahead) -> None:
    case = Case(mixed_trace(seed, 20), slots, policy, balancer, ahead, rows=seed % 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualLink, "read_ahead", lambda self, move: Flow(1e15, 0.0))
        assert_same(simulated(case), executed(case, Endless))


class Next(Predictor):
    """The experts of a layer that follow those that the layer before it chose; also over the end of a step."""

    needs = frozenset({Signal.ROUTING})
    reach = 1

    def __init__(self, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts

    def guesses(self, seen: PredictorInputs) -> list[Guess]:
        if seen.layer == START:
            return []
        scores = torch.zeros(len(seen.ids), self.experts).scatter_(1, (seen.ids.long() + 1) % self.experts, 1.0)
        return [Guess((seen.layer + 1) % self.layers * self.experts, scores)]


class Often(Predictor):
    """Names the same experts in every step, at its start."""

    needs = frozenset()

    def __init__(self, layers: int, experts: int) -> None:
        self._often = (torch.arange(layers * experts) * 7 % 11)[None]

    def guesses(self, seen: PredictorInputs) -> list[Guess]:
        return [Guess(0, self._often)] if seen.layer == START else []


LOOKING = st.builds(
    lambda kind, depth, extra: PrefetchSettings(
        prefetch="named", built=kind(3, 8), depth=depth, extra=extra, background=1
    ),
    st.sampled_from([Next, Often]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([None, 0.1, 1.0]),
)


@given(SEEDS, st.integers(2, 23), st.sampled_from(POLICIES), BALANCERS, LOOKING)
@settings(max_examples=examples(30), **BUSY)
def test_guesses_about_layers(seed: int, slots: int, policy: str, balancer: str, ahead) -> None:
    case = Case(mixed_trace(seed, 20), slots, policy, balancer, ahead, rows=seed % 9)
    for seconds, background in ((0.0, Instant), (1e15, Endless)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VirtualLink, "read_ahead", lambda self, move, left=seconds: Flow(left, 0.0))
            assert_same(simulated(case), executed(case, background))


NEXT_LAYER = PrefetchSettings(next_layer=True, background=1)


@given(SEEDS, st.integers(2, 23), st.sampled_from(POLICIES))
@settings(max_examples=examples(30), **BUSY)
def test_the_next_layer_of_forwards_with_many_rows(seed: int, slots: int, policy: str) -> None:
    """What counts as many, and as right often enough, is less than in serving: forwards have 5 rows here."""
    case = Case(mixed_trace(seed, 20), slots, policy, "none", NEXT_LAYER, rows=seed % 9)
    for seconds, background in ((0.0, Instant), (1e15, Endless)):
        with few_are_many() as patch:
            patch.setattr(VirtualLink, "read_ahead", lambda self, move, left=seconds: Flow(left, 0.0))
            assert_same(simulated(case), executed(case, background))


@contextlib.contextmanager
def few_are_many() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_PAIRS", 1), ("_RIGHT", 0.3), ("_LEAST", 2)):
            patch.setattr(loader, name, value)
        yield patch


def test_the_next_layer_is_read_while_a_layer_computes() -> None:
    """On the virtual clock, too, and steps are shorter for it; with few rows nothing is read."""
    found = {}
    for on in (False, True):
        case = Case(mixed_trace(0), 12, "reuse", ahead=PrefetchSettings(next_layer=on))
        assert simulated(case)[-1].counters["prefetches"] == 0
        with few_are_many():
            replay = replay_of(case)
            found[on] = replay.run(rows_of_records(case.trace))
    assert found[True].prefetch_hits > 0 and found[True].seconds < found[False].seconds


def test_guesses_read_and_pin_something() -> None:
    """Reads ahead of guesses take virtual time; the oracle is right about all of them, and earlier."""
    found = {}
    for kind in (Next, Often):
        ahead = PrefetchSettings(prefetch="named", built=kind(3, 8), extra=1.0)
        found[kind] = simulated(Case(mixed_trace(0), 12, ahead=ahead))[-1].counters
        assert found[kind]["prefetches"] and found[kind]["prefetch_hits"]
    ahead = PrefetchSettings(prefetch="oracle", built=Oracle(24))
    best = simulated(Case(mixed_trace(0), 12, ahead=ahead))[-1].counters
    assert best["hits"] > max(counts["hits"] for counts in found.values())


def test_what_the_cpu_computed_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reads on demand: only what the CPU computed gets slots, and hits follow from it."""
    monkeypatch.setattr(VirtualLink, "read_ahead", lambda self, move: Flow(0.0, 0.0))
    free = {"ahead": PrefetchSettings(background=1)}
    stale, fresh = (
        simulated(Case(mixed_trace(1, 60), 12, "reuse", f"waterfill@admit={admit}", **free))[-1].counters
        for admit in (False, True)
    )
    assert stale["prefetches"] == 0 < fresh["prefetches"] and fresh["prefetch_hits"]
    assert fresh["hits"] > stale["hits"] and fresh["cpu_experts"] < stale["cpu_experts"]


@pytest.mark.parametrize(("seconds", "late"), [(0.0, False), (1e15, True)])
def test_limits_prefetch_something(seconds: float, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualLink, "read_ahead", lambda self, move: Flow(seconds, 0.0))
    ahead = PrefetchSettings(prefetch="utility", background=1, options={"gamma": 2})
    counts = simulated(Case(mixed_trace(0), 12, ahead=ahead))[-1].counters
    assert counts["prefetch_hits"] and counts["prefetches"] and bool(counts["prefetch_late"]) == late
    assert late or counts["prefetch_wasted"]


# -- the link ------------------------------------------------------------------------------------------------------
# An expert of 4 bytes: 1 second without the bandwidth and then 4 with all of it; 4 loads at once.


@pytest.mark.parametrize("background", [None, 3])
@pytest.mark.parametrize("io_threads", [1, 2, 3, 4, 8])
def test_as_many_readers_as_in_an_engine(io_threads: int, background: int | None) -> None:
    """A profile says how many loads run at once: those of the I/O threads, and one of the forward thread."""
    case = Case(mixed_trace(0), 6, ahead=PrefetchSettings(prefetch="utility", background=background))
    engine, made = execution_of(case, io_threads), replay_of(case, at_once=io_threads + 1)
    with contextlib.closing(engine):
        assert engine._loader._transfers.ahead._threads == made.link.ahead._readers


FOUR = Moved("link", 4)


def link(readers: int = 1) -> VirtualLink:
    return VirtualLink(COSTS, 4, readers)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_loads_alone_take_what_the_profile_says(count: int) -> None:
    made, counters = link(), Counters()
    assert made.load([(key, key) for key in range(count)], counters) == {}
    assert made.take_waited() == made.clock() == counters.stall_seconds == COSTS.loading(count, 4)
    assert made.take_waited() == 0 and counters.loads == count and counters.bytes == {"link": 4 * count}


def test_reads_ahead_one_after_the_other() -> None:
    made = link()
    made.ahead.fetch([(0, 0), (1, 1)])
    made.run(4.9)
    assert made.ahead.take_finished() == {} and made.ahead.cancel([0, 1]) == [1] and list(made.ahead.keys) == [0]
    made.ahead.fetch([(2, 2)])
    made.run(0.2)
    assert made.ahead.take_finished() == {0: FOUR} and made.ahead.cancel([2]) == []
    made.run(4.8)
    assert made.ahead.take_finished() == {}
    made.run(0.2)
    assert made.ahead.take_finished() == {2: FOUR} and not made.ahead.keys and made.take_waited() == 0


def test_two_readers_share_the_bandwidth() -> None:
    made = link(2)
    made.ahead.fetch([(0, 0), (1, 1)])
    made.run(1 + 7.9)
    assert made.ahead.take_finished() == {}
    made.run(0.2)
    assert made.ahead.take_finished() == {0: FOUR, 1: FOUR}


def test_what_a_layer_waits_for_goes_first() -> None:
    """The read in flight (3 s left) shares the bandwidth from the load's second on; the queued one begins after it."""
    made = link()
    made.ahead.fetch([(0, 0), (1, 1)])
    made.run(2)
    made.load([(2, 2)], None)
    assert made.take_waited() == pytest.approx(1 + 2 * 2 + 2), "1 s alone, then 2 bytes each in 4 s, then 2 alone"
    assert made.ahead.take_finished() == {0: FOUR} and made.ahead.cancel([1]) == [], (
        "it begins when the layer has what it needs"
    )
    assert made.ahead.wait([1]) == {1: FOUR} and made.take_waited() == pytest.approx(5)
