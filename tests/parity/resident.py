"""Prints the MiB by which a process grows when it makes an engine with 1 GiB of KV cache, and after it has answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import engine


def resident() -> int:
    """MiB of this process's own memory that are in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon"))


def main(model: str, spac: str) -> None:
    import warm  # noqa: F401  what vLLM imports is no growth
    from vllm import SamplingParams

    before = resident()
    with engine(model, json.loads(spac), num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 30) as llm:
        ready = resident() - before
        tokens = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": list(range(5, 69))}], tokens, use_tqdm=False)
        print(json.dumps([ready, resident() - before]))


if __name__ == "__main__":
    main(*sys.argv[1:])
