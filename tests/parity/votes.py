"""Runs one engine under several settings of a budget: `votes.py JSON` prints what each said as JSON.

In a process of its own, see ``compare``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import engines


def _listen(worker: Any) -> None:
    runtime = worker._spac_experts().runtime
    runtime.seen, begin = [], runtime.begin_step

    def begun(step: Any) -> None:
        runtime.seen.append([(request.start, request.drafts, request.weights) for request in step.requests])
        begin(step)

    runtime.begin_step = begun


def _heard(worker: Any) -> list:
    runtime = worker._spac_experts().runtime
    heard, runtime.seen = runtime.seen, []
    return heard


def said(llm: Any, settings: dict, prompts: list, max_tokens: int) -> dict:
    """Greedy tokens under ``settings`` with their log-probabilities, the rows of each step, and the counters."""
    from vllm import SamplingParams

    import vllm_spac

    llm.collective_rpc("spac_budget", args=(settings,))
    before = vllm_spac.stats(llm)["workers"][0]["budget"]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [output.outputs[0] for output in llm.generate(requests, sampling, use_tqdm=False)]
    after = vllm_spac.stats(llm)["workers"][0]["budget"]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        "steps": llm.collective_rpc(_heard)[0],
        "counted": {name: after[name] - before[name] for name in ("rows", "unweighted", "dropped_weight")},
        "setting": after["setting"],
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with engines.engine(asked["model"], asked["spac"], **asked["options"]) as llm:
        llm.collective_rpc(_listen)
        prompts = engines.PROMPTS[: asked["prompts"]]
        print(json.dumps([said(llm, settings, prompts, asked["max_tokens"]) for settings in asked["settings"]]))
