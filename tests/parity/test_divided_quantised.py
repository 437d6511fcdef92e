"""Quantised experts that ranks divide, beside one rank of stock vLLM, whose CPU kernels cannot divide any."""

from __future__ import annotations

import os
from pathlib import Path

import engines
import pytest
import quantised
import torch
from exactness import FLOAT32, assert_same_tokens

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks spin while they wait: needs 2 CPUs"),
]
DIVIDED = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
FLOATS = ("fp8", "fp8 by channel", "int8", "nvfp4")
KERNELS = ("fp8", "int8", "int4 by 128", "gptq by 32", "awq by 32", "mxfp4")


def knobs(folder: Path) -> list[dict]:
    """Fewer slots than a forward needs, and some experts computed in place."""
    return [
        {"slots": "60%", "store": "disk", "disk_dir": str(folder), "guard": "off"},
        {"slots": "60%", "store": "host", "cpu_experts": "2", "guard": "off"},
    ]


@pytest.mark.parametrize("scheme", FLOATS)
def test_our_kernels_give_the_tokens_of_the_weights_that_codes_mean(scheme: str, tmp_path: Path) -> None:
    packed = quantised.write(scheme, tmp_path / "packed")
    plain = quantised.write(scheme, tmp_path / "plain", torch.float32)
    (stock,) = quantised.runs(plain, [None], allowed=False, **FLOAT32)
    assert len({tuple(tokens) for tokens in stock.tokens}) > 4, "this model says the same to everything"
    for run in quantised.runs(packed, knobs(tmp_path / "disk"), allowed=False, **DIVIDED, **FLOAT32):
        assert_same_tokens(run, stock, scheme)
        first, last = run.workers
        assert first["execution"] == "table" and first["divided"] == "experts"
        assert first["experts"] == last["experts"] == first["layers"] * quantised.EXPERTS // 2
        assert min(first["misses"], last["misses"]) > 0 and first["hits"] != last["hits"]


@pytest.mark.skipif(quantised.missing() is not None, reason=str(quantised.missing()))
@pytest.mark.parametrize("scheme", KERNELS)
def test_vllm_s_kernels_give_the_log_probabilities_of_one_rank(scheme: str, tmp_path: Path) -> None:
    """But for sums of bfloat16 in another order; and to the bit what ranks with a slot for each expert give.

    Half may be farther apart: vLLM's INT4 and INT8 kernels round rows to 8 bits, and where two experts are as good as
    equal to a router, ranks may choose the other one. With the experts of the other rank nearly all are.
    """
    model = quantised.write(scheme, tmp_path / "packed")
    (stock,) = quantised.logprobs(model, [None])
    few, every = quantised.logprobs(model, [knobs(tmp_path / "disk")[0], {"slots": "100%"}], **DIVIDED)
    assert few == every
    apart = []
    for prompt, ours, theirs in zip(engines.PROMPTS, few, stock, strict=True):
        for ((token, our),), ((same, their),) in zip(ours[: len(prompt) - 1], theirs, strict=False):
            assert token == same
            apart.append(abs(our - their))
    assert len(apart) > 300 and sorted(apart)[len(apart) // 2] < 30 * 2**-8, max(apart)
