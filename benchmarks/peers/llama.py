"""llama.cpp in its own process, which takes turns like ``serving/engine.py``; started by ``beside_llama.py``.

``python llama.py JOB`` answers each line of its input, ``{"prompt": [ids], "tokens": n}``, with the tokens that
llama.cpp chose greedily, and its own times. JOB: ``model`` (a GGUF file), ``threads``, ``context``, ``mapped``,
``repacks``: whether weights of 4 bits are copied to a layout of its own, which is never mapped, and ``exact``: whether
keys and values stay float32, which flash attention would round to float16.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path


def serve(job: dict) -> None:
    import xllamacpp

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.port = job["context"], 1, 0
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
        print(json.dumps(answer(server.listening_address, json.loads(line))), file=answers)


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


if __name__ == "__main__":
    serve(json.loads(Path(sys.argv[1]).read_text()))
