"""The multi-level queue against a sorted list: 10^5 operations in `make test-full`, some thousands otherwise."""

from __future__ import annotations

from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_spac.cache.prefetcher import LevelQueue

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure


class Twin:
    """(score, arrival, key) in a list that is sorted whenever it is asked."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int]] = []
        self.arrivals = 0

    def order(self) -> list[int]:
        return [key for _, _, key in sorted(self.entries, key=lambda entry: (-entry[0], entry[1]))]

    def score(self, key: int) -> int | None:
        return next((score for score, _, other in self.entries if other == key), None)

    def put(self, key: int, score: int) -> None:
        if self.score(key) != score:
            self.discard(key)
            self.arrivals += 1
            self.entries.append((score, self.arrivals, key))

    def discard(self, key: int) -> bool:
        before = len(self.entries)
        self.entries = [entry for entry in self.entries if entry[2] != key]
        return len(self.entries) < before

    def pop(self, threshold: int) -> int | None:
        first = next(iter(self.order()), None)
        if first is None or self.score(first) < threshold:
            return None
        self.discard(first)
        return first


operations = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 7), st.integers(1, 4)),
    st.tuples(st.just("put"), st.integers(0, 7), st.integers(1, 4)),
    st.tuples(st.just("pop"), st.integers(1, 5)),
    st.tuples(st.just("discard"), st.integers(0, 7)),
)


def agree(queue: LevelQueue, twin: Twin, operation: tuple) -> None:
    name, *arguments = operation
    assert getattr(queue, name)(*arguments) == getattr(twin, name)(*arguments), operation
    assert list(queue) == twin.order() and len(queue) == len(twin.entries)
    assert all((key in queue) == (twin.score(key) is not None) for key in range(8))


@given(st.lists(operations, max_size=60))
@settings(max_examples=examples(150), **BUSY)
def test_agrees_with_a_sorted_list(operations: list[tuple]) -> None:
    queue, twin = LevelQueue(), Twin()
    for operation in operations:
        agree(queue, twin, operation)
