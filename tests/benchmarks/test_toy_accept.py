"""What the acceptance benchmark derives from vLLM's counters, and which prompts it takes."""

from __future__ import annotations

import pytest

from benchmarks.toy import accept, corpus

TOKENIZER = accept.Tokenizer.from_file(str(accept.MODELS / "target" / "tokenizer.json"))


def test_acceptance_length_is_one_plus_accepted_per_draft():
    counters = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 6}
    result = accept.summary(counters, [[1, 2], [3, 4]], [[1, 2], [3, 5]])
    assert result["acceptance_length"] == 2.5
    assert result["requests_equal_to_no_speculation"] == 1


def test_the_interval_is_of_groups_drawn_with_repetition():
    alike = [{"drafts": 10, "accepted_tokens": 15}] * 5
    assert accept.acceptance_interval(alike) == [2.5, 2.5]
    apart = [{"drafts": 10, "accepted_tokens": 10 * right} for right in (0, 1, 2, 3, 4)]
    low, high = accept.acceptance_interval(apart)
    assert 1 <= low < accept.acceptance_length(apart) == 3 < high <= 5 and high - low > 1


def test_run_without_speculation_has_no_acceptance():
    assert accept.summary({}, [[1]], [[1]]) == {"requests": 1, "requests_equal_to_no_speculation": 1}


def test_prompts_are_held_out():
    paths = {str(p): p for p in corpus.files() if corpus.is_held_out(p)}
    chosen = accept.prompts(TOKENIZER, 3, 64)
    assert len(chosen) == 3
    for prompt in chosen:
        assert len(prompt["ids"]) == 64
        assert any(path.endswith(prompt["file"]) for path in paths)


def test_too_many_prompts_are_refused():
    with pytest.raises(ValueError, match="held-out files"):
        accept.prompts(TOKENIZER, 10_000, 64)


def test_no_path_of_this_machine_is_recorded(tmp_path):
    (tmp_path / "models" / "draft").mkdir(parents=True)
    table = accept.methods(tmp_path / "models", tmp_path / "int8")
    assert not any(name.startswith("dense") for name in table), "of the carved model alone"
    assert {"none", "ngram-5", "eagle3-3", "eagle3-5", "eagle3-8", "draft-3", "int8-5"} <= set(table)
    for config in table.values():
        assert str(tmp_path) not in str(accept.portable(config))
