"""Runs real vLLM engines one after another in this process, and compares their outputs."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import shared

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # `make test-v2`
DTYPE = "bfloat16"
BLOCKS = 256  # of the KV cache, which vLLM fills with zeros: more than the requests here need
# Lengths from one token to several chunks of prefill (64 tokens a forward).
PROMPTS = [
    [(7 * i + j * (i + 3)) % 500 + 5 for j in range(length)] for i, length in enumerate((1, 5, 23, 64, 90, 150, 31, 8))
]


@dataclass(frozen=True)
class Run:
    """Greedy tokens of each prompt, the plugin's counters if it was on, and the engine's dtype.

    ``stats`` are those of the first worker, ``workers`` those of all, ``total`` those of the engine.
    """

    tokens: list[list[int]]
    stats: dict = field(default_factory=dict)
    dtype: str = DTYPE
    workers: list[dict] = field(default_factory=list)
    total: dict = field(default_factory=dict)


@contextlib.contextmanager
def engine(model: str, spac: dict | None = None, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` that is gone when the block ends, and with it what it set in the environment."""
    import warm  # noqa: F401
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "dtype": DTYPE,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": BLOCKS,
        "disable_log_stats": False,
        **options,
    }
    llm, environment = None, dict(os.environ)
    try:
        llm = LLM(model=str(model), additional_config={} if spac is None else {"spac": spac}, **settings)
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def say(llm: Any, prompts=None, max_tokens: int = 16) -> list[list[int]]:
    """Greedy tokens for ``prompts``."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in (prompts or PROMPTS)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(requests, sampling, use_tqdm=False)]


def generate(model: str, spac: dict | None = None, **options: Any) -> Run:
    """As ``run``; what stock vLLM says is computed once per session."""
    if spac is None:
        return stock(model, options, lambda: run(model, **options))
    return run(model, spac, **options)


def stock(model: str, options: dict, compute: Callable[[], Run]) -> Run:
    """What stock vLLM says: the first caller with this model and ``options`` computes it."""
    arguments = {"model": str(model), "prompts": PROMPTS, "max_tokens": 16, **options}
    return Run(**shared.once("stock", arguments, lambda: asdict(compute())))


def run(model: str, spac: dict | None = None, prompts=None, max_tokens: int = 16, **options: Any) -> Run:
    """Greedy tokens for ``prompts``, in one engine that is gone afterwards."""
    import vllm_spac

    with engine(model, spac, **options) as llm:
        tokens = say(llm, prompts, max_tokens)
        found = vllm_spac.stats(llm) if spac is not None else {"workers": [], "total": {}}
        stats = found["workers"][0] if spac is not None else {}
        return Run(tokens, stats, options.get("dtype", DTYPE), found["workers"], found["total"])
