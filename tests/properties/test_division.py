"""Rows of a prompt among workers: every row once, and no worker left idle or overloaded for long."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.methods.od_moe.division import WINDOW, LayerLoad, parts, sent

PART = 16


@given(rows=st.integers(1, 4096), workers=st.integers(1, 9), part_rows=st.integers(1, 256))
def test_parts_are_all_rows_in_order_and_of_one_size(rows: int, workers: int, part_rows: int) -> None:
    found = parts(rows, workers, part_rows)
    assert found[0].start == 0 and found[-1].stop == rows
    assert all(one.stop == other.start for one, other in pairwise(found))
    sizes = [part.stop - part.start for part in found]
    assert min(sizes) >= 1 and max(sizes) <= min(part_rows, min(sizes) + 1)
    if rows <= part_rows:
        assert len(found) == 1, "rows of decoding are not divided"
    else:
        assert len(found) % workers == 0 or len(found) == rows, "as many for each worker"
        assert len(found) < rows / part_rows + workers, "no more than needed"


def test_undivided_parts_go_to_their_first_worker() -> None:
    loads = {3: LayerLoad(1, 100, 9.0), 5: LayerLoad(0, 0, 1.0)}
    assert sent([(1, [3, 5])], loads, divided=False) == [3]
    assert sent([(1, [3, 5])] * 2, loads, divided=False) == [3, None], "it has two then"
    assert sent([(1, [5])], loads, divided=False) == [5], "3 lost it"
    for divided in (False, True):
        assert sent([(1, []), (1, [3])], loads, divided) == [None, 3] and sent([], {}, divided) == []


def test_divided_parts_go_where_they_are_done_first() -> None:
    def first(one: LayerLoad, other: LayerLoad, *more: int) -> list[int | None]:
        return sent([(rows, [0, 1]) for rows in (10, *more)], {0: one, 1: other}, True)

    assert first(LayerLoad(), LayerLoad()) == [0] and first(LayerLoad(1, 10), LayerLoad()) == [1]
    assert first(LayerLoad(1, 10, 0.1), LayerLoad(0, 0, 1.0)) == [0], "ten times as fast"
    assert first(LayerLoad(2, 20, 0.1), LayerLoad(0, 0, 1.0)) == [None], "it waits for the fast one"
    assert first(LayerLoad(2, 20, 0.3), LayerLoad(0, 0, 1.0), 10) == [None, 1], (
        "the second would be the fast one's fourth"
    )
    assert first(LayerLoad(1, 10, 2.0), LayerLoad()) == [1], "a stranger counts as the others do"


@given(
    rows=st.integers(PART + 1, 2000),
    paces=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5),
)
def test_workers_of_any_speed_end_together(rows: int, paces: list[float]) -> None:
    """Parts are handed out as workers answer. If a part ends at M, and w would have ended it no earlier, w has at least
    M / pace - part rows, so M <= (rows + part * workers) / (sum of speeds). That an open part counts as not begun adds
    as much again.
    """
    workers = list(range(len(paces)))
    waiting = [part.stop - part.start for part in parts(rows, len(paces), PART)]
    largest, now = max(waiting), 0.0
    queues: dict[int, list[int]] = {worker: [] for worker in workers}
    ends = dict.fromkeys(workers, 0.0)  # of the part in front
    computed = dict.fromkeys(workers, 0)
    while waiting or any(queues.values()):
        loads = {worker: LayerLoad(len(queue), sum(queue), paces[worker]) for worker, queue in queues.items()}
        chosen = sent([(part, workers) for part in waiting], loads, divided=True)
        for part, worker in zip(waiting, chosen, strict=True):
            if worker is not None:
                queues[worker].append(part)
                if len(queues[worker]) == 1:
                    ends[worker] = now + part * paces[worker]
        waiting = [part for part, worker in zip(waiting, chosen, strict=True) if worker is None]
        busy = [worker for worker in workers if queues[worker]]
        assert busy, "a part waits and nobody works"
        worker = min(busy, key=ends.__getitem__)
        now = ends[worker]
        computed[worker] += queues[worker].pop(0)
        if queues[worker]:
            ends[worker] = now + queues[worker][0] * paces[worker]
    assert sum(computed.values()) == rows
    assert now <= (rows + 2 * largest * len(paces)) / sum(1 / pace for pace in paces) + 1e-9


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_workers_compute_equal_shares(workers: int) -> None:
    found = [part.stop - part.start for part in parts(WINDOW * workers * 128, workers)]
    chosen = sent([(rows, range(workers)) for rows in found], dict.fromkeys(range(workers), LayerLoad()), divided=True)
    assert all(sum(rows for rows, one in zip(found, chosen, strict=True) if one == w) == WINDOW * 128
               for w in range(workers))  # fmt: skip
