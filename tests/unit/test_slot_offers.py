"""In-layer admission: what is on offer after steps, and what the host makes of their reports, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, UNUSED

from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.policies.lfu import LFU
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.execution.device.admission_reports import ReportAccount, with_prompts
from vllm_spac.execution.device.slot_offers import SlotOffers
from vllm_spac.recording.metrics import Counters


class Offered:
    """A layer of five experts, of which 0, 1 and 2 are in the slots of the same number."""

    def __init__(self, policy: Policy, owner: tuple[int, ...] = (0, 1, 2)) -> None:
        self.owner = torch.tensor(owner, dtype=torch.int32)
        self.made = SlotOffers(policy.formula(1, 5, torch.device("cpu")), len(owner))
        self.made.update(self.owner)

    def use(self, *counts: int) -> Offered:
        self.made.update(self.owner, torch.tensor(counts))
        return self

    @property
    def owners(self) -> list[int]:
        """Of the slots that are worth at least as much to somebody else, the next victim first."""
        return self.made.offers.owners[: self.made.ready[1]].tolist()


def test_before_any_step_all_slots_are_on_offer() -> None:
    for policy in (LRU(), LFU(), Reuse()):
        assert Offered(policy, (2, 0, 1)).owners == [0, 1, 2], "among equals those that were filled first"


def test_the_one_used_longest_ago_is_offered_first() -> None:
    offered = Offered(LRU(), (1, 0, 2)).use(1, 0, 0, 0, 0)
    assert offered.owners == [1, 2, 0] and offered.made.offers.slots.tolist() == [0, 2, 1]
    assert offered.made.offers.used.isinf().all(), "whoever is used now comes last"


def test_what_nobody_would_take_is_not_offered() -> None:
    """0 was used three times, the others outside never: they would have one use."""
    offered = Offered(LFU()).use(1, 0, 0, 0, 0).use(1, 0, 0, 0, 0)
    assert offered.owners == [1, 2] and offered.made.offers.owners.tolist() == [1, 2, 0]


def test_a_step_without_rows_that_generate_teaches_nothing() -> None:
    offered = Offered(LRU()).use(0, 1, 0, 0, 0)
    offered.made.update(offered.owner)
    assert offered.owners == [0, 2, 1]


def test_the_offers_are_of_those_who_are_there_now() -> None:
    """3 came in place of 1, used or not: it is the one used last."""
    offered = Offered(LRU())
    offered.owner[1] = 3
    offered.made.update(offered.owner)
    assert offered.owners == [0, 2, 3]


def test_the_next_offers_know_what_the_last_step_used() -> None:
    """By ``reuse`` an expert that came back is worth more than one that did not, in a slot or without."""
    offered = Offered(Reuse())
    for _ in range(3):
        offered.use(1, 0, 0, 1, 0)
    used, kept = offered.made.offers.used, offered.made.offers.kept
    assert offered.owners == [1, 2], "0 was used in every step: no other could be worth more"
    assert used[3] > used[4] > kept[1], "a fourth use of 3, a first one of 4, none of 2"
    assert used[4] == used[1]
    offered.use(0, 0, 0, 0, 1)
    assert used[4] > used[1], "of two that nothing else is known of, the one that the last step used"


def test_a_prompt_is_known_to_the_next_offers() -> None:
    """Its last rows selected 1: of those that nothing else is known of it goes last."""
    offered = Offered(Reuse())
    offered.made.formula.observe_prompt(torch.tensor([[[1], [1], [-1]]]))
    offered.made.update(offered.owner)
    assert offered.made.offers.owners.tolist() == [0, 2, 1]


# --- what the host makes of reports -----------------------------------------------------------------------------------


def filled(keys: int = 5, slots: int = 3) -> ReportAccount:
    """Experts 0 ... slots - 1 lie in the slots of the same number."""
    made = ReportAccount(keys, slots, Counters())
    made.residency.update_owners(np.arange(slots), np.arange(slots))
    return made


def add(account: ReportAccount, sources: list[int], owner: list[int]) -> tuple[int, ...]:
    counts = (np.array(sources) != UNUSED).astype(np.int32)
    return account.add(counts, np.array(sources), np.array(owner))[:2]


def test_all_rows_beside_prompts_are_counted() -> None:
    """0 is used by a row that generates, and all by rows of a prompt."""
    account, counts = filled(), np.array([2, 1, 0, 1, 0])
    sources = with_prompts(counts, np.array([HIT, UNUSED, UNUSED, UNUSED, UNUSED]), np.array([0, 1, 2]))
    assert sources.tolist() == [HIT, HIT, UNUSED, STREAMED, UNUSED], "3 has no slot"
    assert account.add(counts, sources, np.array([0, 1, 2]))[:2] == (1, 0)
    assert (account._counters.hits, account._counters.misses) == (2, 1)


def test_slots_change_owners_at_once() -> None:
    """Two experts swap with two others in one step; the second's slot is not the first's old one by accident."""
    account = filled(keys=6)
    add(account, [UNUSED, UNUSED, HIT, ADMITTED, ADMITTED, UNUSED], [4, 3, 2])
    assert account.residency.slot_of.tolist() == [-1, -1, 2, 1, 0, -1]
    account.residency.check_integrity()


def test_two_slots_for_one_are_noticed() -> None:
    with pytest.raises(AssertionError, match="two slots"):
        add(filled(), [UNUSED] * 5, [3, 3, 2])
