"""Slots that change hands under running kernels: a slot that is read while it is written is a wrong token that no later
check would find.

The serving code of the host, ``ReportAccount``, runs against streams of a model: what is submitted becomes micro-steps
(a kernel's block reads its pointer, then each byte of what it points at; a copy writes byte after byte), which an
explorer takes in every order that streams and events allow, and in random orders where there are too many. Layers admit
what they miss, and their kernels copy it as they compute. Reads ahead take no slots: ``test_early_reads``. The host
runs ahead of both as far as it likes.

A step that is one replay of a CUDA graph is one submission: here, all launches of a step are.
"""

from __future__ import annotations

import random

import pytest
from interleavings import Scenario, World, explore, run_randomly

from vllm_spac.execution.device.admission_reports import ReportAccount
from vllm_spac.execution.exchange import ThreadStream

# Two slots of three experts.
SMALL = Scenario(keys=3, slots=2, width=1, steps=[[[0]], [[0, 2]], [[2, 1]], [[0, 2]]])
# Three slots of five experts: a kernel copies what it has admitted, for two blocks.
TWICE = Scenario(keys=5, slots=3, width=2, steps=[[[3, 3], [4], [0]], [[1, 1], [2]], [[3]]])


@pytest.mark.parametrize("scenario", [SMALL, TWICE], ids=["one block", "two blocks"])
def test_no_interleaving_of_a_small_model_reads_a_slot_that_is_written(scenario):
    interleavings, states, ends = explore(World(scenario))
    print(f"{interleavings:.3g} interleavings, {states} states, slots {sorted(ends)}")
    assert interleavings > 10**6
    assert len(ends) == 1, "who has a slot in the end does not depend on how late the host is"


# --- what the explorer must find ------------------------------------------------------------------------------------


class TooEarly(World):
    """Further blocks of an expert read the slot that the first one fills."""

    def begin_kernel(self, keys):
        super().begin_kernel(keys)
        for block in self.blocks:
            block[1:2], block[4] = [0 if block[4] else self.scenario.width], True


class Unfilled(World):
    """A block reads a byte less into the slot than there are."""

    def begin_kernel(self, keys):
        super().begin_kernel(keys)
        for block in self.blocks:
            block[1] = 1


class Late(ReportAccount):
    """Who took a slot is not believed."""

    def add(self, counts, sources, owner):
        return super().add(counts, sources, self.residency.owner.copy())


BUGS = {
    "reports are not believed": {"account": Late},
    "two blocks, one slot": {"world": TooEarly},
    "a byte is missing": {"world": Unfilled},
}


# --- larger models, random orders ------------------------------------------------------------------------------------


def large(rng: random.Random) -> Scenario:
    """3 to 8 experts in fewer slots, 8 steps of 1 or 2 launches of up to 4 blocks, 3 bytes."""
    keys = rng.randint(3, 8)
    steps = [[launch(rng, keys) for _ in range(rng.randint(1, 2))] for _ in range(8)]
    return Scenario(keys, rng.randint(2, keys - 1), steps, rng.randint(1, 3))


def launch(rng: random.Random, keys: int) -> list[int]:
    blocks = rng.sample(range(keys), rng.randint(1, 3))
    return blocks + blocks[:1] if rng.random() < 0.5 else blocks


def run(seed: int, world=World, **bug) -> World:
    rng = random.Random(seed)
    return run_randomly(world(large(rng), **bug), rng)


SEEDS = [range(250)] + [
    pytest.param(range(start, start + 25_000), marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for start in range(0, 100_000, 25_000)
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_interleavings_of_a_large_model(seeds):
    """A hundred thousand of them with those that are marked."""
    given = sum(run(seed).given for seed in seeds)
    assert given > len(seeds), "hardly any slot was given away, so hardly anything was tested"


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_of_the_rules_is_found(bug):
    with pytest.raises(AssertionError):
        for seed in range(300):
            run(seed, **BUGS[bug])


def test_what_a_stream_fails_with_is_told_to_whoever_asks_for_its_events():
    stream, other = ThreadStream("failing"), ThreadStream("behind")
    ran: list[str] = []

    def fail():
        raise ValueError("no such address")

    stream.submit(fail)
    stream.submit(ran.append, "after the failure")
    event = stream.record()
    other.wait(event)
    other.submit(ran.append, "behind the failure")
    behind = other.record()
    for failed in (event, behind):
        with pytest.raises(ValueError, match="no such address"):
            failed.wait()
        with pytest.raises(ValueError, match="no such address"):
            failed.done()
    stream.close()
    other.close()
    assert ran == []
