"""N-grams of a request's own text beside a drafter: where they are its drafts, and what is learned of both."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.decisions.guard.lookups import Lookups
from vllm_spac.integration.stepping.v1.text_lookup_v1 import LONGEST, SHORTEST, StepLookups, find_drafts

MOST = 3


def test_n_grams_go_on_where_the_drafter_says_the_same() -> None:
    lookups = Lookups()
    assert lookups.chooses("a", [5, 6], 5) and not lookups.chooses("b", [5, 6], 7) and not lookups.chooses("c", [], 5)
    assert lookups.taken == 1


def test_where_both_say_the_same_the_one_goes_on_that_is_right_for_longer() -> None:
    """What the drafter drafted counts, also where n-grams were taken before; what follows a wrong draft does not."""
    lookups = Lookups()
    lookups.chooses("a", [1, 2, 3], 1)
    lookups.observe_tokens("a", [1, 5], drafts=[1, 5])
    assert not lookups.chooses("a", [1, 2], 1)
    lookups.observe_tokens("a", [1, 2], drafts=[1])
    assert not lookups.chooses("a", [1, 2], 1)
    for _ in range(3):
        lookups.observe_tokens("a", [1, 2], drafts=[1, 4])
        assert lookups.chooses("a", [1, 2], 1)
    fresh = Lookups()
    for _ in range(3):
        assert fresh.chooses("a", [1, 2], 1), "what was said behind a wrong draft says nothing of the next"
        fresh.observe_tokens("a", [9, 3], drafts=[1])


def test_where_they_contradict_one_another_the_one_that_was_right_goes_on() -> None:
    """Of all requests; where both say the same, nothing is learned of who is right."""
    lookups = Lookups()
    for _ in range(3):
        assert lookups.chooses("a", [1], 1)
        lookups.observe_tokens("a", [9])
    assert not lookups.chooses("a", [1], 2)
    lookups.observe_tokens("a", [1])
    assert lookups.chooses("b", [1], 2)
    for _ in range(2):
        lookups.observe_tokens("b", [2])
        lookups.chooses("b", [1], 2)
    assert not lookups.chooses("a", [1], 2)


def test_an_answer_is_waited_for_once() -> None:
    lookups = Lookups()
    lookups.chooses("a", [1, 2], 1)
    assert lookups.observe_tokens("a", [1]) == [1, 2] and lookups.observe_tokens("a", [1]) == ()
    lookups.chooses("a", [1, 2], 1)
    lookups.remove("a")
    assert lookups.observe_tokens("a", [1]) == ()


def test_n_grams_have_odds_of_their_own() -> None:
    """They are learned where the drafter's drafts were verified, too, and the drafter's are not theirs."""
    chooser = Chooser(4, lookups := Lookups())
    for _ in range(40):
        lookups.chooses("a", [1, 2], 7)
        chooser.keep("a", Drafted([7], [0.9]))
        chooser.observe_tokens("a", [1, 2, 3])
    good, bad = lookups.odds.chance("a", 0, float("nan")), chooser._odds.chance("a", 0, 0.9)
    assert good > 0.9 > 0.2 > bad
    chooser.keep("a", Drafted.unknown([1]), looked=True)
    chooser.keep("a", Drafted([7], [0.9]))
    assert chooser._worths[-2:] == [good, bad]  # while nothing is known of costs, a draft is worth its chance
    assert lookups.chooses("a", [1, 2], 7) and chooser.facts()["looked_up"] == lookups.taken
    chooser.remove(["a"])
    assert not lookups.odds.requests and not lookups._asked


def runner(texts: list[list[int]]) -> SimpleNamespace:
    ids = np.full((len(texts), 64), -1, dtype=np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    batch = SimpleNamespace(token_ids_cpu=ids, num_tokens_no_spec=np.array([len(text) for text in texts]))
    drafts = SimpleNamespace(num_speculative_tokens=MOST)
    return SimpleNamespace(input_batch=batch, speculative_config=drafts, max_model_len=64)


def longest(text: list[int]) -> list[int]:
    """What follows the first place that has as many of the last tokens as possible."""
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        for start in range(len(text) - size):
            if text[start : start + size] == text[-size:]:
                return text[start + size : start + size + MOST]
    return []


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=3), st.integers(0, 3))
def test_drafts_are_what_followed_the_same_tokens(texts: list[list[int]], new: int) -> None:
    """Whether the batch has the step's tokens already (a list of them) or not (a tensor)."""
    wanted = [longest(text) for text in texts]
    emitted = [text[-min(new, len(text)) :] if new else [] for text in texts]
    wanted = [each if tokens else [] for each, tokens in zip(wanted, emitted, strict=True)]
    assert find_drafts(runner(texts), emitted, emitted) == wanted
    before = [text[: len(text) - len(tokens)] for text, tokens in zip(texts, emitted, strict=True)]
    assert find_drafts(runner(before), torch.zeros(len(texts), 1), emitted) == wanted


def test_the_drafter_goes_on_for_the_others() -> None:
    step = StepLookups(Lookups(), ["a", "b", "c"], [[2, 3], [5], []])
    step.observe_first(["a", "b", "c"], torch.eye(8)[[2, 4, 1]])
    assert step.taken == {"a": [2, 3]} and step.others(["a", "b", "c"]) == [1, 2]


def test_lookups_can_be_switched_on() -> None:
    assert SpacConfig.parse({"guard": "on@lookups=on"}).uses_lookups and not SpacConfig.parse({}).uses_lookups
