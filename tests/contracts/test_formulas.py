"""Policies as formulas over tensors: the order and the values of the policy that the host calls, after any steps.

A policy with ``on_device`` is tested without a change here.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_spac import components
from vllm_spac.decisions.policies.base import Formula, Policy
from vllm_spac.execution.device.slot_offers import SlotOffers

LAYERS, EXPERTS, SLOTS, TOP_K = 3, 4, 6, 2
KEYS = LAYERS * EXPERTS
ARGUMENTS = [
    "lfu@half_life=3",
    "reuse@half_lives=(3,)",
    "utility@gamma=2",
    "utility@upper=1",
    "utility@variant=released",
    "utility@variant=literal",
    "utility@recycle=True",
]
ONLINE = [name for name in components.names("policies") if components.find("policies", name).on_device]
every_formula = pytest.mark.parametrize("name", [*ONLINE, "outside:Fifo", *ARGUMENTS])


class Used(NamedTuple):
    """A step: rows that generate and selected each expert, None for none; slots that change hands; a prompt's rows."""

    counts: list[int] | None
    moves: list[tuple[int, int]]  # (which slot, which expert), each taken if it can be
    prompt: list[list[int]] | None


counts = st.lists(st.integers(-1, 3), min_size=KEYS, max_size=KEYS)
moves = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, KEYS - 1)), max_size=3)
prompts = st.lists(st.lists(st.integers(-1, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K), min_size=1, max_size=4)
generating = st.builds(Used, counts, moves, st.none())
used = st.one_of(generating, generating, st.builds(Used, st.none(), moves, st.none() | prompts))


class Both:
    """A policy as the host calls it, and its formula."""

    def __init__(self, name: str) -> None:
        self.policy: Policy = components.build("policies", name)
        self.formula: Formula = self.policy.formula(LAYERS, EXPERTS, torch.device("cpu"))
        self.owner = torch.arange(SLOTS, dtype=torch.int32) * (KEYS // SLOTS)
        self._use(set(), set(self.owner.tolist()), self.policy.insert)
        self.formula.observe(self.owner)

    def step(self, used: Used) -> None:
        before = set(self.owner.tolist())
        chosen = np.array(used.counts if used.counts is not None else [0] * KEYS)
        for slot, key in used.moves:
            if key not in self.owner and chosen[self.owner[slot]] <= 0:
                self.owner[slot] = key
        held = set(self.owner.tolist())
        for key in before - held:
            self.policy.remove(key)
        insert = self.policy.insert_ahead if used.counts is None else self.policy.insert
        self._use({key for key in before & held if chosen[key] > 0}, held - before, insert)
        if used.prompt is not None:
            self._prompt(used.prompt)
        if used.counts is not None:
            self.policy.observe(chosen)
        self.formula.observe(self.owner, None if used.counts is None else torch.from_numpy(chosen))

    def _use(self, touched: set[int], came: set[int], insert: Callable[[int], None]) -> None:
        for layer in range(LAYERS):
            mine = range(layer * EXPERTS, (layer + 1) * EXPERTS)
            for key in sorted(touched.intersection(mine)):
                self.policy.touch(key)
            for key in sorted(came.intersection(mine)):
                insert(key)

    def _prompt(self, rows: list[list[int]]) -> None:
        """All layers select the same."""
        chosen = np.zeros((len(rows), KEYS), dtype=bool)
        for row, experts in enumerate(rows):
            for expert in experts:
                if expert >= 0:
                    chosen[row, expert::EXPERTS] = True
        self.policy.observe_prompt(chosen)
        self.formula.observe_prompt(torch.tensor(rows, dtype=torch.int32).expand(LAYERS, -1, -1))

    def check(self) -> None:
        order = self.owner[self.formula.order(self.owner)].long()
        assert order.tolist() == deepcopy(self.policy).evict(SLOTS, ())

    def check_newcomers(self) -> None:
        """Who would come for whom, as ``Residency.exchange`` finds out by trying; after some victims too."""
        order = self.owner[self.formula.order(self.owner)].long()
        for key in set(range(KEYS)) - set(self.owner.tolist()):
            comes = (self.formula.used[key] >= self.formula.kept[order]).tolist()
            for gone in range(SLOTS):
                tried = deepcopy(self.policy)
                tried.evict(gone, ())
                tried.insert(key)
                assert (tried.evict(1, ()) != [key]) == comes[gone], (key, gone)


@every_formula
@given(st.lists(used, max_size=25))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_is_the_policy(name: str, steps: list[Used]) -> None:
    both = Both(name)
    both.check()
    for step in steps:
        both.step(step)
        both.check()
    if not name.startswith("reuse"):  # whose newcomers are due when the step has ended
        both.check_newcomers()


@pytest.mark.parametrize("half_lives", [(2, 8, 32), (5,)])
def test_values_of_reuse_are_the_same_bits(half_lives: tuple) -> None:
    """Not only their order: both planes run the same code."""
    both, rng = Both(f"reuse@half_lives={half_lives}"), np.random.default_rng(0)
    for _ in range(50):
        both.step(Used(rng.integers(-1, 3, KEYS).tolist(), [(rng.integers(SLOTS), rng.integers(KEYS))], None))
    assert (both.formula.kept.numpy() == -1 / both.policy.likely).all()


@every_formula
def test_of_the_same_history_those_used_longest_ago_go_first(name: str) -> None:
    """Ties: all slots were filled at once, so that they go in the order of their experts."""
    both = Both(name)
    assert both.owner[both.formula.order(both.owner)].tolist() == both.owner.tolist()
    everything = Used([1] * KEYS, [], None)
    both.step(everything)
    both.check()


class Launches(TorchDispatchMode):
    """Counts what is launched, and refuses what a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero")
        self.count += not func.is_view and not name.startswith("aten::empty")
        return func(*args, **(kwargs or {}))


@every_formula
def test_an_update_waits_for_nothing_and_stays_where_it_is(name: str) -> None:
    """No shape depends on data: it runs over tensors that have none. Addresses are those of the first step."""
    policy = components.build("policies", name)
    made = SlotOffers(policy.formula(48, 128, torch.device("meta")), 1000)
    owner, taken = (torch.zeros(size, dtype=torch.int32, device="meta") for size in (1000, 48 * 128))
    with Launches() as launches:
        made.update(owner, taken)
    assert 20 < launches.count <= 160
    made.formula.observe_prompt(torch.zeros(48, 32, 8, dtype=torch.int32, device="meta"))
    made = SlotOffers(policy.formula(LAYERS, EXPERTS, torch.device("cpu")), SLOTS)
    owner, taken = torch.arange(SLOTS, dtype=torch.int32), torch.ones(KEYS, dtype=torch.int32)
    made.update(owner, taken)
    before = addresses(made)
    made.update(owner, taken)
    assert addresses(made) == before and len(before) > 10


def addresses(made: object) -> list[int]:
    """Of all tensors that it holds, directly or in what it holds."""
    found = []
    for value in vars(made).values():
        if isinstance(value, torch.Tensor):
            found.append(value.data_ptr())
        elif isinstance(value, tuple):
            found += [each.data_ptr() for each in value if isinstance(each, torch.Tensor)]
        elif hasattr(value, "__dict__"):
            found += addresses(value)
    return found
