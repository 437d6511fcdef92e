"""The experts of an MTP head have slots of their own: stock's tokens, loads on demand, and a start that finds them."""

from __future__ import annotations

import json
from pathlib import Path

import engines
import pytest
import tiny_models
from compare import compare
from exactness import assert_same_tokens
from forked import run

SHORT = [prompt for prompt in engines.PROMPTS if len(prompt) < 64]  # vLLM starts no longer ones with an MTP head
EXPERTS = 16
PROGRAM = Path(__file__).parent / "head_drafts.py"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A tiny GLM-4-MoE with a head of 16 experts, and the options of its engine."""
    folder = tmp_path_factory.mktemp("glm4_moe")
    return folder / "model", tiny_models.write("Glm4MoeMTPModel", folder / "model") | {"prompts": SHORT}


def spac(folder: Path, **knobs) -> dict:
    return {"slots": "25%", "store": "disk", "disk_dir": str(folder), "guard": "off"} | knobs


def test_same_tokens_with_a_quarter_of_the_head_s_experts_in_slots(head, tmp_path: Path) -> None:
    model, options = head
    stock, first, second = compare(model, [None, spac(tmp_path), spac(tmp_path)], max_tokens=12, **options)
    for found in (first, second):
        assert_same_tokens(found, stock)
        assert found.stats["steps"]["verify"] > 0, "nothing was verified, so nothing was drafted"
        of_head = found.stats["mtp_head"]
        assert (of_head["slots"], of_head["experts"], of_head["layers"]) == (EXPERTS // 4, EXPERTS, 1)
        assert of_head["misses"] > 0 and of_head["hits"] > 0 and of_head["bytes"]["disk"] > 0
        assert of_head["steps"]["decode"] > found.stats["steps"]["verify"], "each of two drafts is a step of the head"


def test_the_same_drafts_as_with_the_whole_head_in_memory(head, tmp_path: Path) -> None:
    """Drafts do not change tokens, so that nothing else shows whether the head computed with the right experts."""
    model, options = head
    drafts = []
    for slots in ("25%", "100%"):
        asked = {"model": str(model), "spac": spac(tmp_path, slots=slots), "options": options | {"max_tokens": 12}}
        done = run([PROGRAM, json.dumps(asked)])
        assert done.returncode == 0, done.stderr[-2000:]
        drafts.append(json.loads(done.stdout.strip().splitlines()[-1]))
    assert drafts[0] == drafts[1]
    assert len({tuple(each) for step in drafts[0] for each in step}) > 8, "it drafts the same whatever it reads"
