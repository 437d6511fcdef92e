"""Requests that take turns: whether it pays is found out, all get their turns, and none waits longer than allowed."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.decisions.guard.payback import LEAST
from vllm_spac.decisions.guard.slices import MOST, TURN, Slices

COMPARED = 2 * TURN  # steps of a pair of blocks
NAMES = "abcdefgh"


class Machine:
    """One layer: each request uses 8 of its own 16 experts in a step, and a missing one takes ``miss`` of a layer."""

    def __init__(self, slots: int, miss: float, seed: int = 0) -> None:
        self.slots, self.miss, self.rng = slots, miss, random.Random(seed)
        self.held = OrderedDict[tuple[str, int], None]()  # by use, the latest last

    def seconds(self, requests) -> float:
        needed = [(request, expert) for request in requests for expert in self.rng.sample(range(16), 8)]
        missing = sum(each not in self.held for each in needed)
        for each in needed:
            self.held[each] = None
            self.held.move_to_end(each)
        while len(self.held) > self.slots:
            self.held.popitem(last=False)
        return 1 + 0.03 * (len(requests) - 1) + self.miss * missing


class Served:
    """Requests that decode on a machine."""

    def __init__(self, machine: Machine, gap: float = math.inf) -> None:
        self.machine, self.slices, self.now = machine, Slices(gap), 0.0
        self.sizes, self.tokens, self.verdicts = Counter[int](), Counter[str](), []

    def run(self, steps: int, names: str = NAMES) -> float:
        """Returns tokens per second."""
        began, before = self.now, self.tokens.total()
        for _ in range(steps):
            aside = self.slices.plan(list(names), self.now)
            ran = [name for name in names if name not in aside]
            self.now += self.machine.seconds(ran)
            verdict = self.slices.end_step(ran, len(ran), self.now)
            if verdict is not None:
                self.verdicts.append((self.slices.sizes, verdict.stop))
            self.sizes[len(ran)] += 1
            self.tokens.update(ran)
        return (self.tokens.total() - before) / (self.now - began)


def together(machine: Machine, steps: int) -> float:
    return len(NAMES) * steps / sum(machine.seconds(NAMES) for _ in range(steps))


def test_turns_where_a_few_requests_have_their_experts_in_the_slots() -> None:
    """16 slots hold what one request uses; more than that is loaded again in every step, whoever shares it."""
    served, shared = Served(Machine(16, 0.5)), together(Machine(16, 0.5), 1000)
    served.run(12000)
    assert list(dict.fromkeys(served.verdicts)) == [((4, 8), False), ((2, 4), False), ((1, 2), False)]
    served.sizes.clear()
    rate = served.run(4000)
    assert served.sizes.most_common(1)[0][0] == 1 and rate > 1.5 * shared
    assert max(served.tokens.values()) - min(served.tokens.values()) <= 2 * TURN, "all have as many turns"


def test_turns_of_as_many_as_the_slots_hold() -> None:
    """Two requests fit. One alone has no fewer loads, and saves only the rows of the other."""
    served = Served(Machine(32, 0.5))
    served.run(12000)
    served.sizes.clear()
    served.run(4000)
    assert served.sizes.most_common(1)[0][0] == 2


@pytest.mark.parametrize(("slots", "miss"), [(128, 0.5), (16, 0.0)])
def test_all_share_where_turns_do_not_pay(slots: int, miss: float) -> None:
    """Nothing is missing, or it takes no time: then a row less saves little, and a turn loses the other tokens."""
    served, steps = Served(Machine(slots, miss)), 20000
    rate = served.run(steps)
    assert served.verdicts[:3] == [((fewer, 8), True) for fewer in (4, 2, 1)] and all(
        stop for _, stop in served.verdicts
    )
    assert served.sizes[8] > 0.85 * steps and rate > 0.9 * together(Machine(slots, miss), 1000)


def test_one_alone_is_tried_where_two_and_four_do_not_pay() -> None:
    """Two have as many loads as eight, and fewer tokens; one has few."""
    slices, now, seconds, sizes = Slices(math.inf), 0.0, {8: 7.0, 4: 4.0, 2: 2.0, 1: 0.5}, []
    for _ in range(4 * LEAST * COMPARED):
        ran = set(NAMES) - slices.plan(NAMES, now)
        now += seconds[len(ran)]
        slices.end_step(ran, len(ran), now)
        sizes.append(len(ran))
    assert sizes[3 * LEAST * COMPARED + 1 :] == [1] * (LEAST * COMPARED - 1)


def test_it_is_found_out_again_when_the_machine_changes() -> None:
    served = Served(Machine(16, 0.5))
    served.run(8000)
    served.machine.slots = 128
    served.run(70000)
    served.sizes.clear()
    served.run(4000)
    assert served.sizes.most_common(1)[0][0] == 8
    served.machine.slots = 16
    served.run(40000)
    served.sizes.clear()
    served.run(4000)
    assert served.sizes.most_common(1)[0][0] < 8


def test_one_request_has_every_step() -> None:
    served = Served(Machine(16, 0.5))
    served.run(10 * COMPARED, "a")
    assert served.sizes == {1: 10 * COMPARED} and not served.verdicts


def test_a_first_step_is_shared_then_turns_and_shared_steps_are_compared() -> None:
    served = Served(Machine(16, 0.5))
    served.run(1 + COMPARED * 2, "ab")
    assert served.sizes == {1: COMPARED, 2: 1 + COMPARED}
    assert served.tokens["a"] == served.tokens["b"]
    served.run(COMPARED * (MOST - 2) + 1, "ab")
    assert served.verdicts[0][0] == (1, 2) and LEAST <= MOST


def test_a_gap_that_is_shorter_than_a_step_leaves_all_together() -> None:
    served = Served(Machine(16, 0.5), gap=4.0)  # steps of all: up to 33
    served.run(1000)
    assert served.sizes == {8: 1000} and not served.verdicts, "shared steps were compared with themselves"


def test_turns_are_as_long_as_the_gap_allows() -> None:
    slices, now, turns = Slices(10.0), 0.0, []
    for _ in range(COMPARED):
        aside = slices.plan("abcd", now)
        now += 1.0
        slices.end_step([name for name in "abcd" if name not in aside], 1, now)
        turns.append("".join(sorted(aside)))
    assert turns[0] == "" and turns[1 : TURN + 1] == (["cd"] * 10 + ["ab"] * 10) * 3 + ["cd"] * 4


def test_steps_with_prompts_are_not_compared() -> None:
    slices, now = Slices(math.inf), 0.0
    for number in range(4 * LEAST * COMPARED):
        ran = {*"ab"} - slices.plan("ab", now)
        now += len(ran) ** 2
        with_prompt = ran | {"prompt"} if number % 2 else ran
        assert slices.end_step(with_prompt, len(ran), now) is None or number >= 2 * LEAST * COMPARED
    assert ran != {*"ab"}, "turns pay"


def test_who_comes_waits_for_the_next_turn() -> None:
    """And does not make up for the turns that the others had before."""
    slices, now, tokens = Slices(math.inf), 0.0, Counter[str]()
    for number in range(20 * TURN):
        names = "abcd" if number < 10 * TURN + TURN // 2 else "abcdef"
        ran = set(names) - slices.plan(names, now)
        now += len(ran) ** 1.5
        slices.end_step(ran, len(ran), now)
        if len(names) == 6:
            tokens.update(ran)
            assert tokens.total() > 3 * TURN // 2 or not ran & {*"ef"}, "the turn of others had not ended"
    assert max(tokens.values()) - min(tokens.values()) <= 2 * TURN


def test_turns_of_many_groups_are_as_long_as_the_gap_allows() -> None:
    slices, now, turns = Slices(6.0), 0.0, []
    for _ in range(4000):
        ran = set("abcd") - slices.plan("abcd", now)
        now += len(ran) ** 2 / 8
        slices.end_step(ran, len(ran), now)
        turns.append(ran)
    lengths = [(sorted(ran), len(list(steps))) for ran, steps in itertools.groupby(turns[-300:])]
    assert lengths[1:5] == [([name], 16) for (name,), _ in lengths[1:5]], "6 seconds, of 3 others, of 8 steps each"
    assert len({name for (name,), _ in lengths[1:5]}) == 4


STEPS = st.lists(
    st.tuples(
        st.integers(0, 255),  # which of eight requests decode
        st.floats(0.5, 2.0),  # seconds of the step, at most twice as long as the last one
        st.booleans(),  # whether a prompt shares it
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.floats(1.0, 40.0), st.integers(1, 8), st.booleans())
def test_nobody_waits_longer_than_allowed(steps, gap: float, repeat: int, pays: bool) -> None:
    """Whoever decodes goes on within the gap, a step longer than those before it, and its own step.

    Requests come and go at any time.
    """
    slices, now, last, longest = Slices(gap), 0.0, {}, 0.0
    for mask, seconds, prompt in steps:
        names = [name for number, name in enumerate(NAMES) if mask >> number & 1]
        for _ in range(repeat * 8):
            aside = slices.plan(names, now)
            assert aside < set(names) or not names
            last = {name: last.get(name, now) for name in names}
            ran = [name for name in names if name not in aside]
            took = seconds * (len(ran) / 8 if pays else 1.0)
            longest, now = max(longest, took), now + took
            for name in ran:
                assert now - last[name] <= gap + 2 * longest + 1e-9
                last[name] = now
            for name in aside:
                assert now - last[name] <= gap + longest + 1e-9
            slices.end_step([*ran, *(["prompt"] if prompt else [])], len(ran), now)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1, 200))
def test_all_have_their_turns(requests: int, gap: int) -> None:
    """Where turns pay, nobody has a token more than two turns ahead of another."""
    names, slices, now, tokens = NAMES[:requests], Slices(float(gap)), 0.0, Counter[str]()
    last = dict.fromkeys(names, 0.0)
    for _ in range(2500):
        ran = set(names) - slices.plan(names, now)
        now += (len(ran) / requests) ** 1.5
        for name in ran:
            assert now - last[name] <= gap + 1
            last[name] = now
        tokens.update(ran)
        slices.end_step(ran, len(ran), now)
        assert max(tokens.values()) - min(tokens[name] for name in names) <= 2 * TURN
    assert len(ran) < requests or gap < 2
