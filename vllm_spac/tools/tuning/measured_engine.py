"""One engine that ``vllm-spac tune`` measures, in a process of its own.

``python -m vllm_spac.tools.tuning.measured_engine JOB`` answers each line of its input with a line of JSON; the first
line says that it is ready, and what it is. See ``measurer``, which asks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(job: dict) -> None:
    """Starts the engine of ``job`` and answers until the input ends."""
    faulthandler.register(signal.SIGUSR1)  # says where it stands still, see ``measurer.stacks``
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    llm = _start(job)
    print(json.dumps(_facts(llm)), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = _explained if asked["explain"] else _answered
        print(json.dumps(answer(llm, _ids(llm, asked["prompt"], job["prompt_tokens"]), asked["tokens"])), file=answers)


def _start(job: dict) -> Any:
    """Returns an ``LLM`` as ``vllm serve`` would configure it, but without a prefix cache: prompts are repeated."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    rows, requests = EngineArgs.get_batch_defaults(1)
    options = {
        "max_num_batched_tokens": rows[UsageContext.OPENAI_API_SERVER],
        "max_num_seqs": requests[UsageContext.OPENAI_API_SERVER],
        "enable_prefix_caching": False,
        **job["options"],
        "disable_log_stats": False,
    }
    if job["spac"] is not None:
        options["additional_config"] = {"spac": job["spac"]}
    return LLM(model=job["model"], speculative_config=job["drafts"], **options)


def _facts(llm: Any) -> dict:
    import psutil
    import torch

    import vllm_spac
    from vllm_spac.integration.hooks.device import is_cpu

    config = llm.llm_engine.vllm_config.additional_config
    stores = [worker["store"] for worker in vllm_spac.stats(llm)["workers"]] if "spac" in config else [""]
    process = psutil.Process()
    processes = [process, *process.children(recursive=True)]
    dtype = llm.llm_engine.vllm_config.model_config.dtype
    return {
        "near_ties": dtype != torch.float32,
        "on_cpu": is_cpu(),
        "nbytes": sum(each.memory_info().rss for each in processes),
        "resident": all(store == "resident" for store in stores),
    }


def _ids(llm: Any, prompt: str | list[int], most: int) -> list[int]:
    return (llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt)[:most]


def _answered(llm: Any, ids: Sequence[int], tokens: int) -> dict:
    begin = time.perf_counter()
    output = _generated(llm, ids, tokens)
    seconds = time.perf_counter() - begin
    return {
        "ids": list(output.outputs[0].token_ids),
        "seconds": seconds,
        "first_token": output.metrics.first_token_latency,
    }


def _explained(llm: Any, ids: Sequence[int], tokens: int) -> dict:
    """Returns a ``ReferenceAnswer``: the second best token at each place, and how far it is from the best."""
    answer = _generated(llm, ids, tokens, logprobs=2).outputs[0]
    second, gap = [], []
    for place in answer.logprobs:
        best, other = sorted(place.items(), key=lambda item: item[1].rank)[:2]
        second.append(other[0])
        gap.append(best[1].logprob - other[1].logprob)
    return {"ids": list(answer.token_ids), "second": second, "gap": gap}


def _generated(llm: Any, ids: Sequence[int], tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    (output,) = llm.generate([{"prompt_token_ids": list(ids)}], sampling, use_tqdm=False)
    return output


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
