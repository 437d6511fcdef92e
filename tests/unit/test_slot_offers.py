"""Host side of in-layer admission: its offers, and what it learns from the layers' reports, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, UNUSED

from vllm_spac.cache.allowance import Allowance
from vllm_spac.decisions.policies.lfu import LFU
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.execution.device.slot_offers import Offering, with_prompts
from vllm_spac.recording.metrics import Counters


def filled(policy, keys: int = 5, slots: int = 3, experts: int = 5) -> Offering:
    """Experts 0 ... slots - 1 lie in the slots of the same number; a layer has ``experts``."""
    made = Offering(keys, experts, slots, policy, Counters())
    placement = made.residency.prepare(range(slots))
    for key, slot in placement.loads:
        made.residency.finish_load(key)
        made.residency.owner[slot], made.residency.slot_of[key] = key, slot
    made.residency.release(range(slots))
    return made


def learn(offering: Offering, sources: list[int], owner: list[int], prompts: bool = False) -> tuple[int, int]:
    counts = np.array(sources) != UNUSED
    counts = counts.astype(np.int32)
    return offering.learn(counts, np.array(sources), np.array(owner), generating=None if prompts else counts)[:2]


def test_the_one_used_longest_ago_is_offered_first() -> None:
    offering = filled(LRU())
    learn(offering, [HIT, UNUSED, UNUSED, UNUSED, UNUSED], [0, 1, 2])
    offered = offering.offer()
    assert (
        offered.owners.tolist() == [1, 2, 0]
        and offered.slots.tolist() == offering.residency.slot_of[[1, 2, 0]].tolist()
    )
    assert np.isinf(offered.used).all(), "whoever is used now comes last"


def test_what_nobody_would_take_is_not_offered() -> None:
    """0 was used three times, the others outside never: they would have one use."""
    offering = filled(LFU())
    for _ in range(2):
        learn(offering, [HIT, UNUSED, UNUSED, UNUSED, UNUSED], [0, 1, 2])
    assert offering.offer().owners.tolist() == [1, 2]


def test_what_became_of_reads_ahead() -> None:
    """3 is read in place of 1, which is then missed; 3 is used a step later, 4 is read and evicted unused."""
    offering, none = filled(LRU()), [UNUSED] * 5
    offering.allowance = Allowance(1.0)

    def step(sources: list[int], owner: list[int], guessed: list[int]) -> list[int]:
        counts = (np.array(sources) != UNUSED).astype(np.int32)
        found = offering.learn(counts, np.array(sources), np.array(owner), np.array(guessed), generating=counts)
        assert found.ahead == guessed.count(ADMITTED)
        counters = offering._counters
        return [
            counters.prefetches,
            counters.prefetch_hits,
            counters.prefetch_wasted,
            counters.prefetch_harmful,
            counters.misses,
        ]

    assert step([HIT, UNUSED, UNUSED, UNUSED, UNUSED], [0, 3, 2], none[:3] + [ADMITTED, UNUSED]) == [1, 0, 0, 0, 0]
    assert step([HIT, STREAMED, UNUSED, HIT, UNUSED], [0, 3, 2], none) == [1, 1, 0, 1, 1]
    assert step([HIT, STREAMED, UNUSED, UNUSED, UNUSED], [0, 3, 4], none[:4] + [ADMITTED]) == [2, 1, 0, 1, 2], "once"
    assert step([HIT, UNUSED, ADMITTED, UNUSED, UNUSED], [0, 3, 2], none) == [2, 1, 1, 2, 3]
    offering.residency.check_integrity()


def test_beside_prompts_the_rows_that_generate_are_learned_of() -> None:
    """0 is used by a row that generates and 1 by one of a prompt: only 0 becomes the one used last."""
    offering = filled(LRU())
    counts, generating = np.array([2, 1, 0, 1, 0]), np.array([1, 0, 0, 0, 0])
    sources = with_prompts(counts, np.array([HIT, UNUSED, UNUSED, UNUSED, UNUSED]), np.array([0, 1, 2]))
    assert sources.tolist() == [HIT, HIT, UNUSED, STREAMED, UNUSED], "3 has no slot"
    assert offering.learn(counts, sources, np.array([0, 1, 2]), generating=generating)[:2] == (1, 0)
    assert offering.offer().owners.tolist() == [1, 2, 0]
    assert (offering._counters.hits, offering._counters.misses) == (2, 1)


def test_slots_change_owners_at_once() -> None:
    """Two experts swap with two others in one step; the second's slot is not the first's old one by accident."""
    offering = filled(LRU(), keys=6)
    learn(offering, [UNUSED, UNUSED, HIT, ADMITTED, ADMITTED, UNUSED], [4, 3, 2])
    assert offering.residency.slot_of.tolist() == [-1, -1, 2, 1, 0, -1]
    offering.residency.check_integrity()


def test_two_slots_for_one_are_noticed() -> None:
    offering = filled(LRU())
    with pytest.raises(AssertionError, match="two slots"):
        learn(offering, [UNUSED] * 5, [3, 3, 2])


def test_the_policy_hears_what_steps_used() -> None:
    """By ``reuse`` an expert that came back is worth more than one that did not, in a slot or without."""
    offering = filled(Reuse())
    for _ in range(3):
        learn(offering, [HIT, UNUSED, UNUSED, STREAMED, UNUSED], [0, 1, 2])
    offered = offering.offer()
    assert offered.owners.tolist() == [1, 2], "0 was used in every step: no other could be worth more"
    assert offered.used[3] > offered.used[4] > offered.kept[1], "a fourth use of 3, a first one of 4, none of 2"
