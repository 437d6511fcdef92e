"""What ``vllm-spac tune`` measures, how it compares, and the profile that it writes."""

from __future__ import annotations

import json
import random
import re
import signal
from itertools import product
from pathlib import Path

import pytest

from vllm_spac.config import tuned_profile
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import DEFAULT, MAY_SET, Drafts, TunedProfile, path_of
from vllm_spac.decisions.comparison import NEAR, Ratio, ReferenceAnswer, compare_tokens
from vllm_spac.errors import ConfigError
from vllm_spac.system.machine import Machine
from vllm_spac.tools.tuning import measurer
from vllm_spac.tools.tuning.variants import variants

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


# -- files --

HERE = Machine(cpu="c", cores=4, disk="d")


def profile(**changes) -> TunedProfile:
    given = {"model": "m", "identity": "a" * 32, "machine": HERE, "versions": {"vllm": "0.32.0"}}
    return TunedProfile(**given | {"choice": "policy=layer_lru", "knobs": {"policy": "layer_lru"}} | changes)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = path_of(tmp_path / "new", "a" * 32)
    whole = profile(ratio=Ratio(median=1.2, low=1.1, high=1.3, turns=9), speculative_config={"method": "ngram"})
    whole.write(path)
    assert TunedProfile.read(path) == whole and list(path.parent.iterdir()) == [path]
    assert whole.differences(HERE, {"vllm": "0.32.0"}) == []
    assert whole.differences(HERE.model_copy(update={"cores": 8}), {"vllm": "0.33.0"}) == [
        "cores: 4, not 8",
        "vllm: 0.32.0, not 0.33.0",
    ]


def test_a_profile_may_set_what_variants_set_and_nothing_else() -> None:
    found: set[str] = set()
    for gpu, drafts in product((True, False), DRAFTS):
        for variant in variants("25%", drafts, rounding=True, gpu=gpu, resident=False):
            found |= set(variant.knobs or {})
            if variant.drafts is not None:
                Drafts.check(dict(variant.drafts))
    assert found == MAY_SET


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"knobs": {"http": "control"}}, "sets no http"),
        ({"knobs": {"record": "trace=/x"}}, "sets no record"),
        ({"knobs": {"budget": 8}}, "sets no budget"),
        ({"knobs": {"plane": "pointers"}}, "sets no plane"),
        ({"allowed": ["rounding"]}, "allowed: Extra inputs are not permitted"),
        ({"knobs": {"policy": "best"}}, "policy='best' is the name of no policy of this package"),
        ({"knobs": {"policy": "json:JSONDecoder"}}, "policy='json:JSONDecoder' is the name of no policy"),
        ({"knobs": {"policy": "utility@upper=1"}}, "is the name of no policy"),
        ({"knobs": {"prefetch": "/x"}}, "prefetch='/x' is the name of no predictor"),
        ({"knobs": {"cpu_experts": "json:JSONDecoder"}}, "is the name of no balancer of this package"),
        (
            {"speculative_config": {"method": "custom_class", "model": "json:JSONDecoder"}},
            "drafts|method: Input should be",
        ),
        ({"speculative_config": {"model": "json.JSONDecoder"}}, "method: Field required"),
        ({"speculative_config": {"method": "eagle3"}}, "drafts of eagle3 need a model"),
        (
            {"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}},
            "rejection_sample_method",
        ),
        ({"engine": {"tensor_parallel_size": "2"}}, "tensor_parallel_size of its engine is no number"),
        ({"format": "spac-tuned-0"}, "format"),
    ],
)
def test_a_profile_that_says_more_than_it_may_is_none(tmp_path: Path, changes: dict, says: str) -> None:
    content = json.loads(profile().model_dump_json()) | changes
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"no tuned profile of format.*{says}.*run vllm-spac tune again"):
        TunedProfile.read(tmp_path / "p.json")


def test_other_files_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no tuned profile.*vllm-spac tune MODEL"):
        TunedProfile.read(tmp_path / "absent.json")
    (tmp_path / "p.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="cannot be read: it has 2097152 bytes, more than 1048576"):
        TunedProfile.read(tmp_path / "p.json")
    (tmp_path / "p.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        TunedProfile.read(tmp_path / "p.json")


def test_the_identity_of_a_model_changes_with_its_config_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    first = tuned_profile.identity(tmp_path)
    assert len(first) == 32
    (tmp_path / "README.md").write_text("other")
    assert tuned_profile.identity(tmp_path) == first
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    second = tuned_profile.identity(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert len({first, second, tuned_profile.identity(tmp_path)}) == 3
