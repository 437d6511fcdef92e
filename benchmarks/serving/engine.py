"""One engine in its own process, controlled by a JSON file; started by ``processes.py``.

``python engine.py JOB RESULT`` runs all prompts at each batch size and writes what it measured. ``python engine.py
JOB`` stays and answers each line of its input, ``{"prompts": [[ids]], "tokens": n}``, with a line about it. The prompts
of a turn are served together. ``{"score": [ids], "first": n}`` is answered with ``scores``, ``{"beside": [[ids]],
"long": [[ids]], "tokens": n}`` with ``beside``, ``{"profile": [[ids]], "steps": n}`` with ``profiled``, ``{"agents":
[[request]], "first": [ids]}`` with ``together``. Counters cover the measured part alone.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_AHEAD = ("prefetches", "prefetch_hits", "prefetch_wasted")
_WAITS = ("stall_seconds", "cpu_wait_seconds")
_COUNTERS = ("hits", "misses", "loads", "host_loads", "cpu_experts", *_AHEAD, "bytes", *_WAITS, "waves", "steps")
_WARM_TOKENS = 4
_ALONE = 24  # tokens of running requests before a long prompt comes
_DIVIDED = ("hits", "misses", "bytes", "steps")  # of a profile


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
        if "beside" in turn:
            print(json.dumps(beside(llm, turn["beside"], turn["long"], turn["tokens"])), file=answers)
            continue
        if "agents" in turn:
            print(json.dumps(together(llm, job, turn["agents"], turn["first"])), file=answers)
            continue
        if "profile" in turn:
            print(json.dumps(profiled(llm, job, turn["profile"], turn["steps"])), file=answers)
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
    if job["options"].get("load_format") == "dummy":
        from benchmarks.shapes import random_weights

        random_weights.register()
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
        "counters": increments(llm, job, before),
    }


def generate(llm, prompts: list[list[int]], batch: int, tokens: int, seed: int) -> list:
    from vllm import SamplingParams

    sampling = SamplingParams(ignore_eos=True, detokenize=False, temperature=0, max_tokens=tokens, seed=seed)
    outputs = []
    for start in range(0, len(prompts), batch):
        requests = [{"prompt_token_ids": prompt} for prompt in prompts[start : start + batch]]
        outputs += llm.generate(requests, sampling, use_tqdm=False)
    return outputs


class Stepped:
    """Requests that are served step by step.

    Attributes:
        times: when each token of a request came, by its name; ``asked``: when it was added; ``said``: its tokens.
    """

    def __init__(self, llm) -> None:
        self._engine = llm.llm_engine
        self.asked: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}
        self.said: dict[str, list[int]] = {}

    def add(self, name: str, ids: list[int], tokens: int, schema: dict | None = None) -> None:
        """Adds a request for so many tokens; one with a JSON schema ends where its document does."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        kind = RequestOutputKind.CUMULATIVE
        follows = None if schema is None else StructuredOutputsParams(json=schema)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=schema is None,
            detokenize=False,
            output_kind=kind,
            structured_outputs=follows,
        )
        self.times[name], self.asked[name] = [], time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": ids}, sampling)

    def step(self) -> list[str]:
        """Runs a step; returns the names of the requests that it ended."""
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            times, said = self.times[output.request_id], list(output.outputs[0].token_ids)
            times += [now] * (len(said) - len(times))
            self.said[output.request_id] = said
        return [output.request_id for output in outputs if output.finished]

    def until(self, names: Iterable[str], tokens: int) -> None:
        """Runs steps until each of these requests has so many tokens."""
        while min(len(self.times[name]) for name in names) < tokens:
            self.step()

    def end(self) -> None:
        """Aborts what still runs."""
        self._engine.abort_request(list(self.times))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def beside(llm, streams: list[list[int]], long: list[list[int]], tokens: int) -> dict[str, float]:
    """Returns what requests of ``streams`` wait for while long prompts are computed; see ``waited``.

    Args:
        tokens: that each of the streams has at most.
    """
    running = Stepped(llm)
    for number, ids in enumerate(streams):
        running.add(f"stream {number}", ids, tokens)
    names = list(running.times)
    running.until(names, _ALONE)
    began = time.perf_counter()
    for number, ids in enumerate(long):
        running.add(f"long {number}", ids, 2)
    beside = [name for name in running.times if name not in names]
    running.until(beside, 1)
    ended = max(running.times[name][0] for name in beside)
    running.end()
    return waited([running.times[name] for name in names], began, ended)


def waited(streams: list[list[float]], began: float, ended: float) -> dict[str, float]:
    """Returns seconds, and ``kept``: the streams' speed from ``began`` to ``ended``, over that before.

    Args:
        streams: when each token of each request came.
    """
    gaps = [
        later - earlier
        for times in streams
        for earlier, later in zip(times, times[1:], strict=False)
        if began < later <= ended
    ]
    before = [
        later - earlier
        for times in streams
        for earlier, later in zip(times[8:], times[9:], strict=False)
        if later <= began
    ]
    alone = statistics.median(before)
    kept = alone * len(gaps) / len(streams) / (ended - began)
    return {"longest_gap": max(gaps, default=ended - began), "kept": kept, "first_token": ended - began, "alone": alone}


def together(llm, job: dict, agents: list[list[dict]], first: list[int]) -> dict:
    """Serves agents at once: each asks its next request when the last one is answered.

    Args:
        agents: requests of each, as of ``agents.recorded.Request``.
        first: a prompt that has been answered before.

    Returns:
        ``served``, as of ``agents.served.Served``, and increments of the ``counters``.
    """
    generate(llm, [first], 1, 1, job["seed"])
    before, running, left = counters(llm, job), Stepped(llm), [list(enumerate(asked)) for asked in agents]
    now: dict[str, tuple[int, int]] = {}  # name of a request that runs -> its agent and turn
    served = []

    def ask(agent: int) -> None:
        if left[agent]:
            turn, request = left[agent].pop(0)
            now[name := f"{agent} {turn}"] = agent, turn
            running.add(name, request["ids"], request["tokens"], request["schema"])

    for agent in range(len(agents)):
        ask(agent)
    while now:
        for name in running.step():
            agent, turn = now.pop(name)
            facts = {"asked": running.asked[name], "times": running.times[name], "tokens": running.said[name]}
            served.append({"agent": agent, "turn": turn, **facts})
            ask(agent)
    return {"served": served, "counters": increments(llm, job, before)}


def profiled(llm, job: dict, prompts: list[list[int]], steps: int) -> dict:
    """Returns the profile of steps in which these requests decode; see ``profiled.profile``."""
    from benchmarks.shapes import profiled as of_gpu

    running = Stepped(llm)
    for number, ids in enumerate(prompts):
        running.add(f"profiled {number}", ids, 8 * steps)
    running.until(list(running.times), _WARM_TOKENS)
    before = counters(llm, job)
    found = of_gpu.profile(running.step, steps)
    moved = increments(llm, job, before)
    running.end()
    if "left_out" not in found:
        found["rates"] = of_gpu.rates()
        found["counters"] = {name: moved[name] for name in _DIVIDED if name in moved}
    return found


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


def increments(llm, job: dict, before: dict) -> dict:
    """Returns what ``counters`` counted since they were ``before``."""
    return {name: difference(value, before[name]) for name, value in counters(llm, job).items()}


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
