"""Votes weighted by the draft's probabilities, on the trained toy model and its drafts."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import engines
import forked
import pytest
from compare import METHODS, TOY, copied


def said(tmp_path: Path, settings: list[dict], drafts: dict, prompts: int, max_tokens: int) -> list[dict]:
    """What one engine said under each of ``settings``; see ``votes.py``."""
    asked = {
        "model": str(TOY / "target"),
        "spac": {"slots": "50%", "store": "disk", "disk_dir": str(tmp_path), "guard": "off"},
        "options": {"speculative_config": drafts, "dtype": "float32", "enable_prefix_caching": False},
        "settings": settings,
        "prompts": prompts,
        "max_tokens": max_tokens,
    }
    return forked.answer(forked.run([Path(__file__).with_name("votes.py"), json.dumps(asked)]))


@pytest.mark.skipif(engines.V2, reason="V2 weighs votes of engines that start with path votes, and these change them")
def test_alpha_decides_and_0_is_uniform(tmp_path: Path) -> None:
    """EAGLE-3 drafts of several requests, some beside prompts."""
    budget = {"budget": 10}
    settings = [budget, *(budget | {"votes": "path", "votes_alpha": alpha} for alpha in (0.0, 0.5))]
    uniform, alpha_0, weighted = said(tmp_path, settings, METHODS["eagle3"], prompts=8, max_tokens=24)
    assert uniform["tokens"] == alpha_0["tokens"]
    assert alpha_0["counted"] == pytest.approx(uniform["counted"], rel=1e-12), "differences of sums"
    assert weighted["tokens"] != uniform["tokens"] and weighted["setting"].endswith("path votes ** 0.5)")
    assert weighted["counted"]["dropped_weight"] > 0
    assert all(weights is None for step in uniform["steps"] for *_, weights in step)
    assert [weighted["counted"]["unweighted"], alpha_0["counted"]["unweighted"]] == [0, 0], "all were known"
    for run in (alpha_0, weighted):
        verified = [weights for step in run["steps"] for _, drafts, weights in step if drafts]
        assert len(verified) > 20
        for weights in verified:
            assert weights[0] == 1 and all(1 >= before >= after >= 0 for before, after in pairwise(weights))
    assert len({weight for weights in verified for weight in weights}) > 50, "probabilities, not constants"


@pytest.mark.skipif(engines.V2, reason="V2 weighs votes of engines that start with path votes, and these change them")
def test_weights_are_the_draft_s_probabilities(tmp_path: Path) -> None:
    """A copy of the target drafts: its own log-probabilities of the tokens, one request at a time."""
    draft = {"method": "draft_model", "model": copied(TOY / "target"), "num_speculative_tokens": 3}
    [exact] = said(tmp_path, [{"votes": "path"}], draft, prompts=1, max_tokens=17)
    [logprobs] = exact["logprobs"]
    verified = [weights for [(_, drafts, weights)] in exact["steps"] if drafts == 3]
    assert len(verified) >= 4, "the drafts were accepted"
    for number, weights in enumerate(verified[:4]):
        first = 1 + 4 * number  # of the tokens after the one that is certain
        expected = [math.exp(sum(logprobs[first : first + length])) for length in range(4)]
        assert weights == pytest.approx(expected, rel=1e-3)
    assert exact["counted"] == {"rows": 0, "unweighted": 0, "dropped_weight": 0}
