"""Runs one engine with requests that come, end and are aborted: `coming_runs.py JSON` prints what they said as JSON.

In a process of its own, see ``compare``.
"""

from __future__ import annotations

import json
import random
import sys

import engines
from engines import PROMPTS

import vllm_spac
from vllm_spac.decisions.prompt_chunks import ChunkPacing
from vllm_spac.integration.stepping import prompt_pacing


def leave_prompts_out(llm) -> list[bool]:
    """Lets steps leave prompts out as in a server, by chance; returns whether one does, of each that might."""
    rng, core, asked = random.Random(0), llm.llm_engine.engine_core.engine_core, []

    def waits(pacing: ChunkPacing) -> bool:
        asked.append(rng.random() < 0.7)
        return asked[-1]

    ChunkPacing.waits = property(waits)
    prompt_pacing.patches.install(prompt_pacing.patches.THROTTLE, prompt_pacing._throttling)
    setattr(core.vllm_config.scheduler_config, prompt_pacing._PACED, True)
    return asked


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


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    with engines.engine(asked["model"], asked["spac"], **asked["options"]) as llm:
        left_out = leave_prompts_out(llm) if asked["paced"] else []
        said, preempted = served(llm, asked["abort"])
        stats = vllm_spac.stats(llm)["workers"][0] if asked["spac"] else {}
    print(json.dumps({"said": said, "preempted": preempted, "stats": stats, "left_out": sum(left_out)}))
