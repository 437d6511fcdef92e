"""What ``vllm-spac tune`` measures, and how it compares."""

from __future__ import annotations

import random
import re
import signal
from itertools import product
from pathlib import Path

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.decisions.comparison import NEAR, Ratio, ReferenceAnswer, compare_tokens
from vllm_spac.tools.tuning import measurer
from vllm_spac.tools.tuning.variants import DEFAULT, variants

ROOT = Path(__file__).parents[2]

# -- variants --

NGRAM = {"method": "ngram", "num_speculative_tokens": 8}
EAGLE = {"method": "eagle3", "model": "/head", "num_speculative_tokens": 4}
COPY = {"method": "draft_model", "model": "/copy", "num_speculative_tokens": 4}
DRAFTS = (None, NGRAM, EAGLE, COPY)


@pytest.mark.parametrize(
    ("slots", "drafts", "rounding", "gpu", "resident"),
    list(product((None, "25%"), DRAFTS, (False, True), (False, True), (False, True))),
)
def test_at_most_eight_changes_of_the_default(
    slots: str | None, drafts: dict | None, rounding: bool, gpu: bool, resident: bool
) -> None:
    default, *others = variants(slots, drafts, rounding=rounding, gpu=gpu, resident=resident)
    base = {} if slots is None else {"slots": slots}
    assert (default.name, default.knobs, default.drafts) == (DEFAULT, base, None)
    assert 1 <= len(others) <= 7 and len({variant.name for variant in others}) == len(others)
    for variant in others:
        SpacConfig.parse(dict(variant.knobs or {}))
        assert base.items() <= (variant.knobs or {}).items() and (variant.knobs, variant.drafts) != (base, None)
    assert any(variant.rounds for variant in others) == (rounding and not resident)
    assert (drafts is None) or drafts in [variant.drafts for variant in others]


def test_the_list_by_what_is_allowed_and_given() -> None:
    def names(drafts: dict | None = None, *, rounding: bool = False, gpu: bool = False) -> list[str]:
        return [v.name for v in variants(None, drafts, rounding=rounding, gpu=gpu, resident=False)][1:]

    own = ["policy=layer_lru", "io_threads=8", "prefetch=gate"]
    assert names() == ["drafts=ngram 4", *own]
    assert names(NGRAM) == ["drafts=ngram 8", *own], "the user's n-grams in place of ours"
    shadow = ["drafts=draft_model 4", "drafts=draft_model 4, prefetch=shadow"]
    assert names(COPY, rounding=True) == ["CPU experts", *shadow, "drafts=ngram 4", *own]
    assert names(EAGLE, gpu=True) == ["drafts=eagle3 4", "drafts=ngram 4", "prefetch=gate"]


def test_each_variant_names_a_page_of_our_results() -> None:
    """In the comment before it."""
    text = (ROOT / "vllm_spac" / "tools" / "tuning" / "variants.py").read_text()
    pages = set(re.findall(r"\b(\w+\.md)\b", text))
    assert len(pages) >= 5 and all((ROOT / "benchmarks" / "results" / page).is_file() for page in pages)


# -- engines --


def test_an_engine_that_is_still_starting_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not see the end of its input, for which an engine is given 30 s."""
    ended: list[int | None] = []

    class Watched(measurer.LiveProcess):
        def close(self) -> None:
            ended.append(self._child.poll())
            super().close()

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measurer.select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Watched(lambda folder: ["sleep", "100"], 60, {})
    assert ended == [-signal.SIGKILL]


# -- comparison --


def test_a_ratio_is_faster_only_if_its_whole_interval_is() -> None:
    rng = random.Random(0)
    same = Ratio.of([rng.gauss(1.0, 0.1) for _ in range(20)])
    faster = Ratio.of([rng.gauss(1.2, 0.05) for _ in range(20)])
    assert not same.is_faster and same.low < 1 < same.high and same.turns == 20
    assert faster.is_faster and 1.1 < faster.low <= faster.median <= faster.high
    assert not Ratio.of([1.0] * 8).is_faster, "as fast is not faster"
    assert "95 % interval" in str(faster)


def test_tokens_that_differ_are_wrong_unless_it_was_close() -> None:
    said = ReferenceAnswer(ids=(1, 2, 3), second=(7, 8, 9), gap=(4.0, NEAR / 2, 4.0))
    for ids, near, verdict in (
        ([1, 2, 3], False, "equal"),
        ([1, 8, 5], True, "near-ties"),
        ([1, 8, 3], False, "wrong"),  # of steps with the same rows
        ([1, 6, 3], True, "wrong"),  # not the second best
        ([1, 2, 9], True, "wrong"),  # not close
        ([1, 2], True, "wrong"),  # too few
        ([1, 2, 3, 4], True, "wrong"),
    ):
        found = compare_tokens([said, said], [[1, 2, 3], ids], near)
        assert (found.verdict, found.answers) == (verdict, 2), ids
        assert found.differ == (verdict != "equal")
    assert compare_tokens([ReferenceAnswer(ids=(1,))], [[2]], True).verdict == "wrong", (
        "it was not asked how close it is"
    )
