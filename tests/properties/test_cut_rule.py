"""The rule that cuts drafts on the device: the chooser's of V1, and the best of all numbers of drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.decisions.guard.cut_rule import CutNumbers, kept, pack
from vllm_spac.decisions.guard.odds import UNKNOWN, Odds

MOST = 6
FILLER = -2  # parent of what is no draft
chance = st.floats(0.001, 0.999)
cost = st.floats(0.0, 2.0)


@st.composite
def chooser(draw) -> Chooser:
    """One that has learned something, and knows what drafts cost."""
    made = Chooser(MOST)
    for _ in range(draw(st.integers(0, 20))):
        made._odds.add(draw(st.sampled_from("ab")), draw(st.integers(0, 9)), draw(chance), draw(st.booleans()))
        made._odds.add_first(draw(st.sampled_from("ab")), draw(st.booleans()))
    made._now = SimpleNamespace(known=True, unsure=False, token=1.0, accepted=draw(cost), rejected=draw(cost))
    return made


@st.composite
def batch(draw, trees: bool) -> dict[str, Drafted]:
    """Drafts of several requests."""
    found = {}
    for request in "abc"[: draw(st.integers(1, 3))]:
        chances = draw(st.lists(st.one_of(chance, st.just(UNKNOWN)), max_size=MOST))
        parents = [draw(st.integers(0, number)) for number in range(len(chances))] if trees else None
        found[request] = Drafted(range(len(chances)), chances, parents)
    return found


def depths(drafts: Drafted) -> list[int]:
    found = [0]
    for number in range(len(drafts.tokens)):
        found.append(found[drafts.parent(number)] + 1)
    return [depth - 1 for depth in found[1:]]


def on_device(
    odds: Odds, gain: float, loss: float, drafted: dict[str, Drafted], most: Sequence[int] | None = None, trees=False
) -> list[int]:
    """The number of kept drafts; buffers are as wide as V2's, whatever a request has."""
    counts = [len(drafts.tokens) for drafts in drafted.values()]
    given = np.array(counts if most is None else most, dtype=np.float64)
    packed = torch.from_numpy(pack(odds.terms(list(drafted), MOST), gain, loss, given))
    chances = torch.full((len(drafted), MOST), 0.5, dtype=torch.float64)
    parents, places = torch.full(chances.shape, FILLER), torch.zeros(chances.shape, dtype=torch.int64)
    for place, (drafts, count) in enumerate(zip(drafted.values(), counts, strict=True)):
        chances[place, :count] = torch.tensor(drafts.chances, dtype=torch.float64)
        parents[place, :count] = torch.tensor([drafts.parent(number) for number in range(count)], dtype=torch.int64)
        places[place, :count] = torch.tensor(depths(drafts), dtype=torch.int64)
    return kept(CutNumbers.unpacked(packed, len(drafted)), chances, (parents, places) if trees else None).tolist()


def gains(made: Chooser, drafts: Drafted, request: str) -> list[float]:
    """What the first n save, for each n: a draft, with all of its path, is accepted or is not."""
    chances = [made._odds.chance(request, depth, drafts.chances[n]) for n, depth in enumerate(depths(drafts))]
    found = [0.0] * (len(chances) + 1)
    for fate in itertools.product((True, False), repeat=len(chances)):
        probability, reached, saving = 1.0, [True], 0.0
        for number, good in enumerate(fate):
            probability *= chances[number] if good else 1 - chances[number]
            reached.append(reached[drafts.parent(number)] and good)
        for number, there in enumerate(reached[1:], 1):
            saving += made._now.token - made._now.accepted if there else -made._now.rejected
            found[number] += probability * saving
    return found


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@given(data=st.data(), made=chooser())
def test_the_device_keeps_what_the_host_would(trees: bool, data: st.DataObject, made: Chooser) -> None:
    """But for ties, where sums of another order are rounded otherwise."""
    drafted = data.draw(batch(trees))
    now = made._now
    found = on_device(made._odds, now.token - now.accepted, now.rejected, drafted, trees=trees)
    for (request, drafts), count in zip(drafted.items(), found, strict=True):
        count, expected = min(count, len(drafts.tokens)), made.keep(request, drafts)
        saved = gains(made, drafts, request)
        assert count == expected or saved[count] == pytest.approx(saved[expected], abs=1e-12)
        assert saved[count] == pytest.approx(max(saved), abs=1e-9), "no other number saves more"


@given(data=st.data(), made=chooser(), gain=st.floats(-1.0, 2.0), loss=cost)
def test_what_a_chain_keeps_depends_on_nothing_behind_it(
    data: st.DataObject, made: Chooser, gain: float, loss: float
) -> None:
    """Else a sampled token would be likelier where the drafts behind it are: cutting would not be exact."""
    drafts = data.draw(batch(False))["a"]
    (count,) = on_device(made._odds, gain, loss, {"a": drafts})
    if count < len(drafts.tokens):
        others = [*drafts.chances[: count + 1], *(data.draw(chance) for _ in drafts.chances[count + 1 :])]
        assert on_device(made._odds, gain, loss, {"a": Drafted(drafts.tokens, others)}) == [count]


def test_terms_are_those_of_a_probability() -> None:
    odds = Odds()
    for depth in range(12):
        odds.add("a", depth, 0.7, depth % 3 > 0)
        odds.add_first("a", depth % 2 > 0)
    slope, places, requests = odds.terms(["new", "a"], 12)
    for depth, place in enumerate(places):
        x = slope * math.log(0.8 / 0.2) + place + requests[1]
        assert odds.chance("a", depth, 0.8) == pytest.approx(1 / (1 + math.exp(-x)))
    assert requests[0] != requests[1]
