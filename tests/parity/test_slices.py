"""Same tokens as stock vLLM while requests take turns: they come, end, are aborted and preempted at any time."""

from __future__ import annotations

import pytest
from compare import METHODS, TOY
from engines import PROMPTS, engine

from vllm_spac.decisions.guard import slices

# Eight requests would use 40 blocks at once.
OPTIONS = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 20}


def served(llm, abort: str) -> tuple[dict[str, list[int]], int]:
    """Greedy tokens of requests that come one after another, of which ``abort`` is aborted; and preemptions."""
    from vllm import SamplingParams

    said, inside, preempted = {}, llm.llm_engine.engine_core.engine_core.scheduler, 0
    preempt = inside._preempt_request

    def preempting(*args, **kwargs):
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    inside._preempt_request = preempting
    waiting = [(f"{number}", prompt[:100], 60 + 9 * number) for number, prompt in enumerate(PROMPTS)]
    step = 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and (step % 4 == 0 or len(waiting) > 4):  # four at once, the others later
            name, prompt, tokens = waiting.pop(0)
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        for output in llm.llm_engine.step():
            said[output.request_id] = list(output.outputs[0].token_ids)
        if len(said.get(abort, ())) >= 20:
            llm.llm_engine.abort_request([abort])
        step += 1
    return said, preempted


@pytest.fixture(scope="module")
def stock() -> dict[str, list[int]]:
    """Without drafts, which change no token: this process survives one engine with them."""
    with engine(str(TOY / "target"), None, **OPTIONS) as llm:
        return served(llm, abort="3")[0]


@pytest.mark.parametrize("method", ["", "eagle3"])
def test_same_tokens_as_stock(method: str, stock, tmp_path, monkeypatch) -> None:
    import vllm_spac

    monkeypatch.setattr(slices, "TURN", 5)
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(tmp_path), "guard": "on@gap=1000"}
    drafting = {"speculative_config": METHODS[method]} if method else {}
    with engine(str(TOY / "target"), spac, **OPTIONS, **drafting) as llm:
        said, preempted = served(llm, abort="3")
        stats = vllm_spac.stats(llm)["workers"][0]
    assert preempted > 0, "no request was preempted"
    assert stats["turns"]["steps"] > 50, "no request was set aside"
    assert said.keys() == stock.keys()
    for name, tokens in said.items():
        if name == "3":
            assert len(tokens) >= 20 and tokens[:20] == stock[name][:20]
        else:
            assert tokens == stock[name] and len(tokens) == 60 + 9 * int(name)
