"""Compares the tokens of a tiny model under the plugin with those of stock vLLM, each in an engine of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_spac.decisions.comparison import ReferenceAnswer, compare_tokens
from vllm_spac.errors import printable
from vllm_spac.tools.machine.checks import CheckOutcome, Finding
from vllm_spac.tools.selftest.tiny_model import VOCABULARY
from vllm_spac.tools.tuning.measurer import Measurer, MeasuringError
from vllm_spac.tools.tuning.variants import Variant

SECONDS = 300.0  # that an engine may take to start, and for an answer
TOKENS = 16
_PROMPTS = (1, 24, 70)  # lengths
STOCK = Variant("stock vLLM", None)
_PLANES = ("slots", "table", "pointers")


def planes(gpu: bool) -> list[Variant]:
    """Returns stock vLLM and each way to run layers that this machine has."""
    found = [STOCK]
    for name in _PLANES:
        store = "host" if gpu or name == "pointers" else "disk"
        found.append(Variant(name, {"plane": name, "slots": "50%", "store": store}))
    return found


def measurer(folder: Path, gpu: bool) -> Measurer:
    """Returns what starts engines over the checkpoint in ``folder``; what they pack is written beside it."""
    options = {
        "dtype": "bfloat16" if gpu else "float32",  # in float32 no near-tie hides an error; of GPUs it needs TF32
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.1,
    }
    return Measurer(str(folder), folder.parent / "packed", options, max(_PROMPTS), SECONDS)


def compared(variants: Sequence[Variant], engines: Measurer) -> Iterator[CheckOutcome]:
    """Yields how the tokens of each variant compare with the first one's; the engines run side by side."""
    with ThreadPoolExecutor(len(variants)) as pool:
        answers = list(pool.map(lambda variant: _answers(variant, engines), variants))
    stock = answers[0]
    for variant, answer in zip(variants, answers, strict=True):
        if isinstance(answer, str):
            yield CheckOutcome(Finding(f"tokens, {variant.name}", "problem", f"no answer: {answer}", _REMEDY))
        elif not isinstance(stock, str) and answer is not stock:
            yield _outcome(variant.name, answer, stock)


_REMEDY = "vllm-spac check; where stock vLLM does not answer either, name another MODEL"


@dataclass(frozen=True)
class _Answers:
    """Of one engine; ``near_ties`` as in ``Engine``."""

    answers: list[ReferenceAnswer]
    near_ties: bool


def _answers(variant: Variant, engines: Measurer) -> _Answers | str:
    """Returns an engine's answers, or the line of what it said instead that names an error."""
    prompts = [[(7 * n + 31 * length) % (VOCABULARY - 8) + 5 for n in range(length)] for length in _PROMPTS]
    try:
        with engines.start(variant) as engine:
            if variant.knobs is None:
                return _Answers([engine.explain(prompt, TOKENS) for prompt in prompts], engine.near_ties)
            answers = [ReferenceAnswer(ids=tuple(engine.answer(prompt, TOKENS).ids)) for prompt in prompts]
            return _Answers(answers, engine.near_ties)
    except MeasuringError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
        return printable([lines[-1], *errors][-1], 200)


def _outcome(name: str, ours: _Answers, stock: _Answers) -> CheckOutcome:
    tokens = compare_tokens(stock.answers, [each.ids for each in ours.answers], ours.near_ties)
    distinct = len({token for each in stock.answers for token in each.ids})
    like = "to stock vLLM's" if tokens.verdict == "equal" else "from stock vLLM's"
    text = f"{tokens} {like}: {tokens.answers} answers of {TOKENS} tokens, {distinct} of them distinct"
    numbers = {"answers": float(tokens.answers), "differ": float(tokens.differ)}
    if tokens.verdict != "wrong":
        return CheckOutcome(Finding(f"tokens, {name}", "ok", text), numbers)
    remedy = f"do not serve with --spac-plane {name} here; report it with the file of --output"
    return CheckOutcome(Finding(f"tokens, {name}", "problem", text, remedy), numbers)
