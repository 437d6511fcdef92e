"""vLLM in this process, for commands that observe a model while it processes texts one at a time, in order."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.tools.evaluation import prompts


@contextlib.contextmanager
def engine(model: str, spac: dict, length: int, tokenizer: bool = True, **options: Any) -> Iterator[Any]:
    """Context with a ``vllm.LLM`` that runs the plugin and forwards a text of ``length`` tokens in one step.

    ``length`` includes generated tokens; ``SpacError`` if vLLM refuses the model or the options, or for several ranks.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if options.get(name, 1) != 1:  # workers would be other processes
            raise ConfigError(f"--engine: a model is observed in one process; leave {name} out")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if "kv_cache_memory_bytes" not in options:  # by default vLLM wants 92 % of all memory to be free
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {
        "max_model_len": length,
        "max_num_batched_tokens": max(length, 64),
        "max_num_seqs": 1,
        "skip_tokenizer_init": not tokenizer,
        "disable_log_stats": False,
        **options,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "additional_config": {"spac": spac},
    }
    llm = None
    try:
        try:
            llm = LLM(model=model, **settings)
        except ValueError as error:  # pydantic's among them; commands print ours as one line
            raise error if isinstance(error, SpacError) else SpacError(f"vLLM refuses {model}: {error}") from error
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens(llm: Any, texts: Sequence[str | list[int]], length: int, limit: int | None) -> list[list[int]]:
    """``prompts.tokens`` with the model's tokenizer, if a text needs one."""
    if all(isinstance(text, list) for text in texts):
        size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        if (highest := max(max(text, default=0) for text in texts)) >= size:
            raise ConfigError(f"the prompts hold the token id {highest}, and the model has {size}")
        return prompts.tokens(texts, None, length, limit)
    return prompts.tokens(texts, llm.get_tokenizer().encode, length, limit)


def read(llm: Any, ids: Sequence[int]) -> None:
    """Runs the model on a text: one forward over all of its rows."""
    generate(llm, [ids], 1)


def generate(llm: Any, texts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Returns greedy continuations of the texts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": list(ids)} for ids in texts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(requests, sampling, use_tqdm=False)]


def options_of(text: str | None, name: str) -> dict:
    """Parses a JSON object from the command line; ``ConfigError`` if it is not one."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise ConfigError(f'{name}: {error}; use a JSON object, e.g. \'{{"dtype": "bfloat16"}}\'') from error
    return value


def length_of(text_tokens: int, more: int, options: Mapping[str, Any]) -> int:
    """Returns the length of requests with a text of ``text_tokens`` tokens and ``more`` behind it.

    Raises:
        ConfigError: ``options``, those of ``--engine``, allow shorter ones only.
    """
    length, most = text_tokens + more, options.get("max_model_len")
    if type(most) is int and 0 < most < length:
        shorter = f"--text-tokens {most - more}, or " if most - more > 1 else ""
        raise ConfigError(
            f"--text-tokens {text_tokens}: with what follows a text, requests have {length} tokens, and --engine has "
            f"max_model_len {most}; use {shorter}max_model_len {length}"
        )
    return length


def spac_of(
    slots: str,
    disk_dir: Path | None,
    predictor: Path | None = None,
    prefetch: str = "off",
) -> dict:
    """The plugin's knobs for a command; ``ConfigError`` if they are invalid. ``prefetch`` is of ``predictor``."""
    spac = {"slots": slots, "guard": "off"}  # so that all steps have the same draft length
    spac |= {} if predictor is None else {"prefetch": f"{prefetch}@file={predictor}"}
    spac |= {} if disk_dir is None else {"disk_dir": str(disk_dir)}
    SpacConfig.parse(spac)
    return spac


class Interruptible:
    """Context in which the first Ctrl-C only sets ``asked``; the second interrupts as usual."""

    def __enter__(self) -> Interruptible:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
