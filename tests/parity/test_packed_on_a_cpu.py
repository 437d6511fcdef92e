"""Quantised experts on a CPU that vLLM has no kernel for: our kernels compute them, as stock vLLM what they mean.

Stock vLLM serves the weights that the codes mean, unquantised. In float32, as in ``test_pointers.py``, each weight is
the product of the same two numbers on both sides, and tokens are equal. Scales of INT4 have the 16 bits of the rows in
our kernels' layout, and biases of MXFP4 are bfloat16 in vLLM's layer. There log-probabilities of prompts are compared,
of rows that need every expert, so that no router has a near-tie to turn.
"""

from __future__ import annotations

import json
from pathlib import Path

import engines
import pytest
import quantised
import torch
from exactness import FLOAT32, assert_same_tokens

QUICK = ("nvfp4", "awq by 32")
FLOATS = ("fp8", "fp8, compressed", "fp8 by channel", "int8", "nvfp4")
HALVES = ("int4 by 32", "int4 by 128", "gptq by 32", "awq by 32", "mxfp4")


def formats(names: tuple[str, ...]) -> list:
    """All but a few are left to `make test-rest`."""
    return [scheme if scheme in QUICK else pytest.param(scheme, marks=pytest.mark.rest) for scheme in names]


def knobs(folder: Path, slots: str) -> list[dict]:
    """Half of the experts in slots, some computed in place; and ``slots``. ``plane`` is left to the plugin."""
    return [
        {"slots": "50%", "store": "host", "cpu_experts": "2", "guard": "off"},
        {"slots": slots, "store": "disk", "disk_dir": str(folder), "guard": "off"},
    ]


@pytest.mark.parametrize("scheme", formats(FLOATS))
def test_same_tokens_as_stock_with_the_weights_that_they_mean(scheme: str, tmp_path: Path) -> None:
    """Also with so few slots that rows are computed in waves."""
    packed = quantised.write(scheme, tmp_path / "packed")
    plain = quantised.write(scheme, tmp_path / "plain", torch.float32)
    (stock,) = quantised.runs(plain, [None], allowed=False, **FLOAT32)
    runs = quantised.runs(packed, knobs(tmp_path / "disk", str(quantised.TOP_K + 1)), allowed=False, **FLOAT32)
    assert len({tuple(tokens) for tokens in stock.tokens}) > 4, "this model says the same to everything"
    for run in runs:
        assert_same_tokens(run, stock, scheme)
        assert run.stats["execution"] == "table" and run.stats["mode"] == "exact up to rounding"
    assert runs[0].stats["cpu_experts"] > 0 and 0 < runs[0].stats["misses"] < runs[1].stats["misses"]


@pytest.mark.rest
def test_experts_in_nvfp4_beside_attention_in_fp8(tmp_path: Path) -> None:
    """A checkpoint of two precisions. Of stock vLLM attention is the same, and experts are what their codes mean."""
    packed = quantised.add_fp8_attention(quantised.write("nvfp4", tmp_path / "packed"))
    plain = quantised.add_fp8_attention(quantised.write("nvfp4", tmp_path / "plain", torch.float32))
    (stock,) = quantised.runs(plain, [None], allowed=False, **FLOAT32)
    (run,) = quantised.runs(packed, knobs(tmp_path, "50%")[:1], allowed=False, **FLOAT32)
    assert len({tuple(tokens) for tokens in stock.tokens}) > 4, "this model says the same to everything"
    assert_same_tokens(run, stock)
    assert run.stats["execution"] == "table" and run.stats["misses"] > 0


@pytest.mark.parametrize("scheme", formats(HALVES))
def test_same_log_probabilities_of_prompts(scheme: str, tmp_path: Path) -> None:
    """But for intermediate results rounded to 11 or 8 bits, in another order: up to 30 times that of a logit."""
    dtype, close = ("bfloat16", 30 * 2**-8) if scheme == "mxfp4" else ("float16", 30 * 2**-11)
    packed = quantised.write(scheme, tmp_path / "packed")
    plain = quantised.write(scheme, tmp_path / "plain", getattr(torch, dtype))
    for folder in (packed, plain):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": quantised.EXPERTS}))
    (stock,) = quantised.logprobs(plain, [None], allowed=False, dtype=dtype)
    for run in quantised.logprobs(packed, knobs(tmp_path / "disk", "60%"), allowed=False, dtype=dtype):
        apart = []
        for prompt, ours, theirs in zip(engines.PROMPTS, run, stock, strict=True):
            for ((token, our),), ((same, their),) in zip(ours[: len(prompt) - 1], theirs, strict=False):
                assert token == same
                apart.append(abs(our - their))
        assert len(apart) > 300 and max(apart) < close, max(apart)
