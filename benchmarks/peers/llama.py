"""llama.cpp in its own process, which takes turns like ``serving/engine.py``; started by ``beside_llama.py``.

``python llama.py JOB`` answers each line of its input, ``{"prompt": [ids], "tokens": n}``, with the tokens that
llama.cpp chose greedily, and its own times, and ``{"agents": [[request]], "first": [ids]}`` with ``together``. JOB:
``model`` (a GGUF file), ``threads``, ``slots``: requests at once, ``context``: tokens of all of them, ``mapped``,
``repacks``: whether weights of 4 bits are copied to a layout of its own, which is never mapped, and ``exact``: whether
keys and values stay float32, which flash attention would round to float16.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path


def serve(job: dict) -> None:
    import xllamacpp

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.port = job["context"], job["slots"], 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    modes = xllamacpp.llama_load_mode
    params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if job["mapped"] else modes.LLAMA_LOAD_MODE_NONE
    if job["exact"]:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.no_extra_bufts = not job["repacks"]
    params.warmup = False  # it would read every expert
    server = xllamacpp.Server(params)
    print(json.dumps({"version": xllamacpp.__version__, "system": xllamacpp.get_system_info()}), file=answers)
    for line in sys.stdin:
        turn = json.loads(line)
        reply = together if "agents" in turn else answer
        print(json.dumps(reply(server.listening_address, turn)), file=answers)


def answer(address: str, turn: dict) -> dict:
    """Runs one prompt; returns its ``tokens``, and ``ttft``, ``tpot`` and ``seconds`` of all of it."""
    asked = {"prompt": turn["prompt"], "n_predict": turn["tokens"], "temperature": 0, "ignore_eos": True}
    asked |= {"cache_prompt": False, "return_tokens": True}
    request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "text/json"})
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    prefill, decode = found["timings"]["prompt_ms"] / 1e3, found["timings"]["predicted_ms"] / 1e3
    count = len(found["tokens"])
    return {
        "tokens": [found["tokens"]],
        "ttft": [prefill],  # the prompt's last logits give the first token
        "tpot": [decode / (count - 1)],
        "seconds": prefill + decode,
    }


def together(address: str, turn: dict) -> dict:
    """Serves agents at once, each in a slot of its own that keeps its prompt, after ``first`` in all of these slots.

    Returns:
        ``served``, as of ``agents.served.Served``.
    """
    asked = turn["agents"]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda slot: streamed(address, slot, turn["first"], 1, None), range(len(asked))))
        served = pool.map(lambda slot: conversation(address, slot, asked[slot]), range(len(asked)))
        return {"served": list(chain.from_iterable(served))}


def conversation(address: str, slot: int, requests: list[dict]) -> list[dict]:
    """Returns the answers of one agent, which asks its next request when the last one is answered."""
    served = []
    for turn, request in enumerate(requests):
        start = time.perf_counter()
        times, tokens = streamed(address, slot, request["ids"], request["tokens"], request["schema"])
        served.append({"agent": slot, "turn": turn, "asked": start, "times": times, "tokens": tokens})
    return served


def streamed(
    address: str, slot: int, prompt: list[int], count: int, schema: dict | None
) -> tuple[list[float], list[int]]:
    """Returns when each token of an answer came, and the tokens; one with a schema ends where its document does."""
    asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": schema is None, "stream": True}
    asked |= {"id_slot": slot, "cache_prompt": True, "return_tokens": True}
    asked |= {} if schema is None else {"json_schema": schema}
    request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode(), {"Content-Type": "text/json"})
    times, tokens = list[float](), list[int]()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if line.startswith(b"data: "):
                said = json.loads(line.removeprefix(b"data: ")).get("tokens", [])
                times += [time.perf_counter()] * len(said)
                tokens += said
    return times, tokens


if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text()))
