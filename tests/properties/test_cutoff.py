"""The cutoff layer of reads while drafts are made: against its definition, and the reads that it learns from phases."""

from __future__ import annotations

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.decisions.cutoff import DraftPhases, cutoff

LAYERS = st.lists(
    st.integers(0, 6).flatmap(lambda wanted: st.tuples(st.just(wanted), st.integers(0, wanted))), max_size=12
)
MANY = 10_000


@settings(max_examples=examples(400))
@given(LAYERS, st.integers(0, 40), st.integers(0, 40))
def test_it_is_the_largest_that_fits_into_memory_and_time(
    layers: list[tuple[int, int]], slots: int, reads: int
) -> None:
    wanted, missing = [w for w, _ in layers], [m for _, m in layers]
    fitting = [
        count for count in range(len(layers) + 1) if sum(wanted[:count]) <= slots and sum(missing[:count]) <= reads
    ]
    assert cutoff(wanted, missing, slots, reads) == max(fitting)


def phase(phases: DraftPhases, capacity: int, asks: list[int]) -> int:
    """A phase that asks for as many reads as it may, at most ``asks`` after each forward; returns how many."""
    keys = iter(range(MANY))
    asked: list[int] = []
    for most in asks:
        new = [next(keys) for _ in range(min(most, phases.left))]
        phases.request(new)
        asked += new
    assert len(asked) <= phases.reads
    phases.end([*asked[capacity:], MANY])
    return len(asked)


@given(st.integers(1, 30), st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_the_reads_that_a_phase_finishes_are_learned(first: int, capacity: int, asks: list[int]) -> None:
    """From then on: as many as the link finishes, or one more, which finds out whether it has become faster."""
    phases = DraftPhases(first)
    for _ in range(60):
        phase(phases, capacity, [*asks, MANY])
    for _ in range(10):
        before, found = phases.reads, phase(phases, capacity, [*asks, MANY])
        assert found == before and before <= capacity + 1
        assert phases.reads in (before + 1, capacity)
    assert phases.reads in (capacity, capacity + 1)


@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=3)), max_size=30))
def test_there_is_always_a_read_to_learn_from(history: list[tuple[int, list[int]]]) -> None:
    phases = DraftPhases(16)
    for capacity, asks in history:
        before = phases.reads
        asked = phase(phases, capacity, asks)
        assert 1 <= phases.reads <= before + 1 and phases.left == phases.reads
        if not asked:
            assert phases.reads == before, "nothing was learned"
