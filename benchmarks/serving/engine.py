"""One engine in a process of its own: ``python engine.py JOB RESULT``, both JSON. Started by ``run.py``.

Each batch size runs all prompts, so many at a time. Counters are those of the measured part alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

_COUNTERS = ("hits", "misses", "loads", "cpu_experts", "bytes", "stall_seconds", "waves", "steps")
_WARM_TOKENS = 4


def main(job_path: Path, result_path: Path) -> None:
    from vllm import LLM

    job = json.loads(job_path.read_text())
    extra = {"additional_config": {"spac": job["spac"]}} if job["spac"] is not None else {}
    start = time.perf_counter()
    llm = LLM(model=job["model"], speculative_config=job["speculative"], **job["options"], **extra)
    load_seconds = time.perf_counter() - start
    generate(llm, job["prompts"], max(job["batches"]), job.get("warm_tokens", _WARM_TOKENS), job["seed"])
    measured = {str(batch): measure(llm, job, batch) for batch in job["batches"]}
    result_path.write_text(
        json.dumps({"load_seconds": load_seconds, "choices": choices(llm, job), "batches": measured})
    )


def measure(llm, job: dict, batch: int) -> dict:
    """All prompts, ``batch`` at a time: seconds, tokens, latencies of each request, and what the counters moved."""
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

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=seed)
    outputs = []
    for start in range(0, len(prompts), batch):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + batch]]
        outputs += llm.generate(requests, sampling, use_tqdm=False)
    return outputs


def per_token(metrics, tokens: int) -> float | None:
    """Seconds for each token after the first; None when there is only one."""
    return (metrics.last_token_ts - metrics.first_token_ts) / (tokens - 1) if tokens > 1 else None


def choices(llm, job: dict) -> dict:
    """What the plugin decided, without its counters; empty for stock."""
    if job["spac"] is None:
        return {}
    return {name: value for name, value in _worker(llm).items() if name not in (*_COUNTERS, "budget")}


def counters(llm, job: dict) -> dict:
    """The plugin's counters, and vLLM's own of speculation."""
    found = {}
    if job["spac"] is not None:
        worker = _worker(llm)
        found = {name: value for name, value in worker.items() if name in _COUNTERS}
        found["budget"] = {name: worker["budget"][name] for name in ("rows", "dropped_mass", "shortlists", "experts")}
    if job["speculative"] is not None:
        prefix = "vllm:spec_decode_num_"
        values = {
            m.name.removeprefix(prefix): m.value
            for m in llm.get_metrics()
            if m.name.startswith(prefix) and hasattr(m, "value")
        }
        found["speculation"] = values
    return found


def difference(after, before):
    """Numbers subtracted, dictionaries of numbers key by key."""
    if isinstance(after, dict):
        return {name: value - before.get(name, 0) for name, value in after.items()}
    return after - before


def _worker(llm) -> dict:
    import vllm_spac

    return vllm_spac.stats(llm)["workers"][0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
