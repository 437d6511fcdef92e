"""One engine in its own process, controlled by a JSON file; started by ``processes.py``.

``python engine.py JOB RESULT`` runs all prompts at each batch size and writes what it measured. ``python engine.py
JOB`` stays and answers each line of its input, ``{"prompts": [[ids]], "tokens": n}``, with a line about it. The prompts
of a turn are served together. ``{"score": [ids], "first": n}`` is answered with ``scores``. Counters cover the measured
part alone.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

_AHEAD = ("prefetches", "prefetch_hits", "prefetch_wasted")
_WAITS = ("stall_seconds", "cpu_wait_seconds")
_COUNTERS = ("hits", "misses", "loads", "host_loads", "cpu_experts", *_AHEAD, "bytes", *_WAITS, "waves", "steps")
_WARM_TOKENS = 4


def run_once(job: dict, result_path: Path) -> None:
    start = time.perf_counter()
    llm = start_engine(job)
    load_seconds = time.perf_counter() - start
    generate(llm, job["prompts"], max(job["batches"]), _WARM_TOKENS, job["seed"])
    measured = {str(batch): measure(llm, job, batch) for batch in job["batches"]}
    result_path.write_text(
        json.dumps({"load_seconds": load_seconds, "choices": choices(llm, job), "batches": measured})
    )


def take_turns(job: dict) -> None:
    faulthandler.register(signal.SIGUSR1)  # says where it stands still, also where it is stock, without a watchdog
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    llm = start_engine(job)
    print(json.dumps(facts(llm)), file=answers)  # ready
    for line in sys.stdin:
        turn = json.loads(line)
        if "score" in turn:
            print(json.dumps(scores(llm, turn["score"], turn["first"])), file=answers)
            continue
        asked = {"prompts": turn["prompts"], "output_tokens": turn["tokens"]}
        measured = measure(llm, job | asked, len(turn["prompts"]))
        print(json.dumps(measured | {"choices": choices(llm, job)}), file=answers)


def facts(llm) -> dict:
    """Returns how a started engine runs: its CUDA graphs, its runner, and bytes of a GPU, None without one."""
    import torch

    (runner,) = llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    graphs = str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode).removeprefix("CUDAGraphMode.")
    used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {"graphs": graphs, "runner": runner, "gpu_bytes": used}


def start_engine(job: dict):
    from vllm import LLM

    if job.get("kernels_without_amx"):
        _select_quantised_kernels()
    extra = {"additional_config": {"spac": job["spac"]}} if job["spac"] is not None else {}
    return LLM(model=job["model"], speculative_config=job["speculative"], **job["options"], **extra)


def _select_quantised_kernels() -> None:
    """Makes vLLM select its kernels for quantised experts on this CPU; it does on one with AMX only."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for kernel in (cpu_moe.CPUExpertsFp8, cpu_moe.CPUExpertsInt8, cpu_moe.CPUExpertsInt4):
        kernel._supports_current_device = staticmethod(lambda: True)


def scores(llm, ids: list[int], first: int) -> dict[str, list]:
    """Returns what this model thinks of each token from the one with number ``first`` on, given those before it.

    ``logprobs``: log-probability of the token; ``best``: whether no token is likelier.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    known = [output.prompt_logprobs[place][token] for place, token in enumerate(ids[first:], first)]
    return {"logprobs": [each.logprob for each in known], "best": [each.rank == 1 for each in known]}


def measure(llm, job: dict, batch: int) -> dict:
    """Runs all prompts, ``batch`` at a time: seconds, tokens, latencies per request, and increments of the counters."""
    before = counters(llm, job)
    start = time.perf_counter()
    outputs = generate(llm, job["prompts"], batch, job["output_tokens"], job["seed"])
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "ttft": [output.metrics.first_token_latency for output in outputs],
        "tpot": [per_token(output.metrics, len(said)) for output, said in zip(outputs, tokens, strict=True)],
        "counters": {name: difference(value, before[name]) for name, value in counters(llm, job).items()},
    }


def generate(llm, prompts: list[list[int]], batch: int, tokens: int, seed: int) -> list:
    from vllm import SamplingParams

    sampling = SamplingParams(ignore_eos=True, detokenize=False, temperature=0, max_tokens=tokens, seed=seed)
    outputs = []
    for start in range(0, len(prompts), batch):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + batch]]
        outputs += llm.generate(requests, sampling, use_tqdm=False)
    return outputs


def per_token(metrics, tokens: int) -> float | None:
    """Returns the seconds per token after the first; None if there is only one."""
    return (metrics.last_token_ts - metrics.first_token_ts) / (tokens - 1) if tokens > 1 else None


def choices(llm, job: dict) -> dict:
    """Returns the plugin's decisions without its counters; empty for stock."""
    if job["spac"] is None:
        return {}
    return {name: value for name, value in _worker(llm).items() if name not in (*_COUNTERS, "budget")}


def counters(llm, job: dict) -> dict:
    """Returns the plugin's counters, vLLM's own of speculation, and those of the job's function ``module:name``.

    The function takes the ``LLM`` and returns numbers by name.
    """
    found = {}
    if job["spac"] is not None:
        worker = _worker(llm)
        found = {name: value for name, value in worker.items() if name in _COUNTERS}
        found["budget"] = {name: worker["budget"][name] for name in ("rows", "dropped_weight", "shortlists", "experts")}
    if job["speculative"] is not None:
        prefix = "vllm:spec_decode_num_"
        values = {
            m.name.removeprefix(prefix): m.value
            for m in llm.get_metrics()
            if m.name.startswith(prefix) and hasattr(m, "value")
        }
        found["speculation"] = values
    if job.get("counters"):
        module, name = job["counters"].split(":")
        found["own"] = getattr(importlib.import_module(module), name)(llm)
    return found


def difference(after, before):
    """Subtracts numbers, or dictionaries of numbers key by key."""
    if isinstance(after, dict):
        return {name: value - before.get(name, 0) for name, value in after.items()}
    return after - before


def _worker(llm) -> dict:
    import vllm_spac

    return vllm_spac.stats(llm)["workers"][0]


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:
        run_once(asked, Path(sys.argv[2]))
    else:
        take_turns(asked)
