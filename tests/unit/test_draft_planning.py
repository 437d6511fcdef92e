"""The guard in V2's scheduler: its inputs for overlapping steps, and its decisions."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest

from vllm_spac.integration.stepping.draft_planning import PlannedDrafts, attach
from vllm_spac.speculation.guard import Guard


class Told:
    """In the guard's place: answers what it is given, and remembers what it is told."""

    max_drafts = 4

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.asked, self.told = list(lengths), [], []

    def choose(self, requests: int) -> int:
        self.asked.append(requests)
        return self.lengths.pop(0)

    def observe(self, *step) -> None:
        self.told.append(step)


def plan(**rows: int):
    """A ``SchedulerOutput``: ``a=3`` are three rows of request a, two of them drafts; ``a=-3`` are a prompt's."""
    drafts = {name: [-1] * (count - 1) for name, count in rows.items() if count > 1}
    return SimpleNamespace(
        num_scheduled_tokens={name: abs(count) for name, count in rows.items()}, scheduled_spec_decode_tokens=drafts
    )


def result(**tokens: int):
    """A ``ModelRunnerOutput``: ``a=2`` are two tokens of request a."""
    return SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(tokens)},
        sampled_token_ids=[[7] * count for count in tokens.values()],
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_that_overlap_take_the_time_between_their_ends() -> None:
    guard, clock = Told(), Clock()
    drafts = PlannedDrafts(guard, clock=clock)
    first, second, third = plan(a=1), plan(a=3), plan(a=3)
    drafts.planned(first)  # at 100
    clock.now = 101
    drafts.planned(second)  # while the first one runs
    clock.now = 104
    drafts.over(first, result(a=1))
    clock.now = 109
    drafts.over(second, result(a=2))
    clock.now = 150  # nobody asked for anything meanwhile
    drafts.planned(third)
    clock.now = 153
    drafts.over(third, result(a=3))
    assert guard.told == [(0, [1], 1, 4.0), (2, [2], 1, 5.0), (2, [3], 1, 3.0)]


def test_what_a_step_is_told_as() -> None:
    guard, clock = Told(), Clock()
    drafts = PlannedDrafts(guard, clock=clock)
    for step, said in [
        (plan(a=3, b=1, c=3), result(c=1, a=3, b=1)),  # by name, in whichever order
        (plan(a=3, b=-5), result(a=2, b=1)),  # a prompt's rows and its first token
        (plan(a=-4), result(a=0)),  # a piece of a prompt
        (plan(a=3, b=3), result(a=0, b=2)),  # one was aborted
        (plan(), result()),
    ]:
        drafts.planned(step)
        clock.now += 1
        drafts.over(step, said)
    assert [told[:3] for told in guard.told] == [(2, [3, 1, 1], 3), (2, [2], 2), (0, [], 1), (2, [2], 2), (0, [], 0)]


def test_a_schedule_of_the_user_s_own_is_the_most() -> None:
    drafts = PlannedDrafts(Told(4, 4, 0), most=[0, 4, 1])
    assert [drafts[1], drafts[2], drafts[2]] == [4, 1, 0]


def test_steps_out_of_order_are_a_bug_and_no_guess() -> None:
    drafts = PlannedDrafts(Told())
    drafts.planned(plan(a=1))
    with pytest.raises(AssertionError, match="order"):
        drafts.over(plan(a=1), result(a=1))


class Scheduler:
    """As vLLM's, for one request that generates for ever: how many drafts a step has was looked up a step before."""

    def __init__(self) -> None:
        self.dynamic_sd_lookup, self.next = None, 0

    def schedule(self):
        step = plan(a=1 + self.next)
        self.next = self.dynamic_sd_lookup[1]
        return step

    def update_from_output(self, step, said):
        return said


@pytest.mark.parametrize("ahead", [1, 2], ids=["one at a time", "async"])
@pytest.mark.parametrize(("accepted", "draft_cost", "best"), [(0.9, 0.1, 4), (0.3, 0.8, 0)], ids=["pays", "costs"])
def test_it_settles_where_tokens_come_fastest(ahead: int, accepted: float, draft_cost: float, best: int) -> None:
    rng, clock, scheduler, guard = random.Random(1), Clock(), Scheduler(), Guard(4)
    attach(scheduler, PlannedDrafts(guard, clock=clock))
    running: deque = deque()
    for _ in range(3000):
        while len(running) < ahead:
            running.append(scheduler.schedule())
        step = running.popleft()
        drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        clock.now += (1 + draft_cost * drafts) * rng.uniform(0.95, 1.05)
        tokens = 1
        while tokens <= drafts and rng.random() < accepted:
            tokens += 1
        assert scheduler.update_from_output(step, said := result(a=tokens)) is said
    assert guard.steps[best] > 0.9 * sum(guard.steps), "a look at other lengths is all else that runs"
