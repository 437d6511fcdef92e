"""Measures a quantised copy as a shadow of the model (OD-MoE's SEP): its routing as a prediction of the model's.

    python benchmarks/toy/shadow.py

The model writes greedily. Its shadow, rounded as by ``vllm-spac quantise --linears all``, processes a token at a time
too: its own next token, or every T-th time the model's (token alignment), when it also takes over the model's keys and
values of all tokens before (KV alignment). With a copy as draft model, T is the length of a verify step. The networks
run in float32; all numbers are of the toy models and not representative of a real one. None is a time.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from export import load_moe
from nets import CausalLM, SparseMLP, rotary_table
from safetensors.torch import load_file, save_file
from texts import chosen
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, TOY, provenance, write_result

from vllm_spac.decisions.predictors._recall import Hits
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors.base import START
from vllm_spac.storage.checkpoint.quantising import Rounding

MODELS = {"flat": "models/target", "local": "models/local/target"}
SHADOWS = {"int8": Rounding("int8", linears="all"), "int4": Rounding("int4", group=32, linears="all")}
PERIODS = (1, 4, 16, None)  # tokens between alignments; None: aligned at no token
PROMPTS, PROMPT, NEW = 4, 32, 96  # files, tokens of each, tokens that the model writes
BLOCK = 32  # written tokens whose recall is averaged, to show a decay


class Run(NamedTuple):
    """A forward over whole sequences.

    Attributes:
        logits: [b, n, V].
        routers: [L, b, n, N], of each layer.
        cached: keys and values [b, h, n, d] of each layer.
    """

    logits: Tensor
    routers: Tensor
    cached: list[tuple[Tensor, Tensor]]


def dequantised(tensors: Mapping[str, Tensor], rounding: Rounding) -> Tensor:
    """Returns the weight [N, K] that ``Rounding.tensors`` stands for, in float32."""
    if rounding.codes == "int8":
        return tensors["weight"].float() * tensors["weight_scale"]
    shape = tensors["weight_shape"].tolist()
    codes = (tensors["weight_packed"][:, :, None] >> (4 * torch.arange(8))) & 15
    groups = (codes.reshape(shape) - 8).unflatten(1, (-1, rounding.group))
    return (groups * tensors["weight_scale"].float()[:, :, None]).flatten(1)


def shadow_of(folder: Path, rounding: Rounding) -> CausalLM:
    """Returns the network of a checkpoint folder with its weights rounded."""
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if rounding.takes(name, {"shape": list(weight.shape), "dtype": "BF16"}):
            weights[name] = dequantised(rounding.tensors(weight), rounding)
    with TemporaryDirectory() as copy:
        save_file(weights, Path(copy) / "model.safetensors")
        (Path(copy) / "config.json").write_text((folder / "config.json").read_text())
        return load_moe(Path(copy))


@torch.inference_mode()
def run(
    model: CausalLM, ids: Tensor, theirs: list[tuple[Tensor, Tensor]] | None = None, taken: Tensor | None = None
) -> Run:
    """Runs ``model`` over ``ids`` [b, n].

    Args:
        theirs: another model's ``Run.cached`` for sequences that are at least as long.
        taken: with it, int [n]: how many of the first keys and values each position takes from ``theirs``.
    """
    table, (_, length) = rotary_table(ids.shape[1], model.shape.head_dim), ids.shape
    before = torch.arange(length)
    causal = before[None] <= before[:, None]
    others = torch.zeros_like(causal) if taken is None else before[None] < taken[:, None]
    x, routers, cached = model.embed_tokens(ids), [], []
    for layer, block in enumerate(model.blocks()):
        attention = block.self_attn
        query, key, value = attention.project(block.input_layernorm(x), table)
        cached.append((key, value))
        scores = query @ key.transpose(2, 3)
        if theirs is not None:
            other_key, other_value = (each[:, :, :length] for each in theirs[layer])
            scores = torch.where(others, query @ other_key.transpose(2, 3), scores)
        probs = (scores / math.sqrt(model.shape.head_dim)).masked_fill(~causal, -torch.inf).softmax(-1)
        mixed = probs.masked_fill(others, 0) @ value
        if theirs is not None:
            mixed = mixed + probs.masked_fill(~others, 0) @ other_value
        x = x + attention.merge(mixed)
        hidden = block.post_attention_layernorm(x)
        assert isinstance(block.mlp, SparseMLP)
        routers.append(block.mlp.gate(hidden))
        x = x + block.mlp(hidden.flatten(0, 1))[0].view_as(x)
    return Run(model.lm_head(model.norm(x)), torch.stack(routers), cached)


def written(model: CausalLM, prompts: Tensor, count: int) -> Tensor:
    """Returns prompts [b, p] with ``count`` greedy tokens after each, [b, p + count]."""
    ids = prompts
    for _ in range(count):
        ids = torch.cat([ids, run(model, ids).logits[:, -1:].argmax(-1)], 1)
    return ids


def followed(shadow: CausalLM, ids: Tensor, prompt: int, theirs: Run, period: int | None) -> Tensor:
    """Returns the routers' logits [L, b, n, N] of a shadow that runs beside the model, from the token ``prompt`` on.

    Args:
        ids: [b, n], what the model processed.
        prompt: number of tokens that both were given.
        theirs: the model's run over ``ids``.
        period: as in ``PERIODS``.
    """
    since = torch.arange(ids.shape[1]) - prompt  # tokens written before
    longest = ids.shape[1] - prompt + 1 if period is None else period
    offset = since + 1 if period is None else since % period  # tokens of its own at the end of what it processed
    taken = torch.zeros_like(since) if period is None else torch.where(since >= 0, since - offset + prompt, 0)
    own = ids.clone()
    for steps in range(1, longest):  # all positions that are as far from their alignment at a time
        chosen_here = torch.nonzero((since >= 0) & (offset == steps)).flatten()
        if len(chosen_here):
            stop = int(chosen_here[-1])
            found = run(shadow, own[:, :stop], theirs.cached, taken[:stop]).logits.argmax(-1)
            own[:, chosen_here] = found[:, chosen_here - 1]
    return run(shadow, own, theirs.cached, taken).routers


def recall(model: Tensor, shadow: Tensor, prompt: int, top_k: int) -> dict[str, Any]:
    """Returns the recall of a shadow's routers, [L, b, n, N], after the prompt: as that of predictors, and by token."""
    true, named = (
        routers[:, :, prompt:].transpose(1, 2).flatten(1, 2) for routers in (model, shadow)
    )  # token by token
    weights, ids = true.softmax(-1).topk(top_k)
    rows, batch = true.shape[1], model.shape[1]
    samples = Samples((0,), torch.zeros(rows, dtype=torch.int64), true[..., :1], true, ids.int(), weights)
    hits = Hits(samples)
    for layer, scores in enumerate(named):
        hits.add(START, layer, slice(0, rows), scores)
    blocks = []
    for start in range(0, rows, BLOCK * batch):
        part = Hits(samples)
        for layer, scores in enumerate(named):
            some = slice(start, min(rows, start + BLOCK * batch))
            part.add(START, layer, some, scores[some])
        blocks.append(part.result()["recall_at_k"])
    return hits.result() | {"reach": 0, "by_token": blocks}


def measured(folder: Path, prompts: Tensor) -> dict[str, Any]:
    """Returns the recall of every shadow of one model, with every period."""
    model = load_moe(folder)
    ids = written(model, prompts, NEW)
    theirs, found = run(model, ids), {}
    for name, rounding in SHADOWS.items():
        shadow = shadow_of(folder, rounding)
        for period in PERIODS:
            routers = followed(shadow, ids, prompts.shape[1], theirs, period)
            one = recall(theirs.routers, routers, prompts.shape[1], model.shape.top_k)
            found[f"{name}, {'never' if period is None else period}"] = one
            print(f"{name}, aligned {period}: {one['recall_at_k']:.4f}", *(f"{each:.3f}" for each in one["by_token"]))
    return found


def main() -> None:
    """Measure on both models, and write the result."""
    torch.manual_seed(0)
    result: dict[str, Any] = {"provenance": provenance(), "toy_model": True, "block": BLOCK}
    result["texts"] = {"files": PROMPTS, "prompt": PROMPT, "written": NEW}
    prompts = torch.tensor([text["prompt_token_ids"] for text in chosen(False, PROMPTS, PROMPT)])
    result["models"] = {name: measured(TOY / model, prompts) for name, model in MODELS.items()}
    write_result(RESULTS / "toy_shadow.json", json.loads(json.dumps(result)))


if __name__ == "__main__":
    main()
