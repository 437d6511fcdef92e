"""OD-MoE's shadow on the carved model: recall by dtype, and by the periods of both alignments. Nothing is timed.

    python benchmarks/papers/shadow.py

The model writes in float32, as in the paper. There it writes greedily. This small model would repeat itself in nine
places of ten, so here both write the token whose logit plus noise is the greatest, with the same noise at the same
place: that is sampling with one seed (Gumbel noise times a temperature).

A rounded copy, its shadow, reads one token for each that the model reads: the model's own where the number of tokens
written before is a multiple of the token period, and else what it would have written itself. Where that number is a
multiple of the KV period, it first takes over the model's keys and values of all tokens before; until then those of its
own stay, also of tokens that were not the model's (section 3.2). Recall is the share of the experts that the model's
routers chose which the shadow chose for the same place (equations 2 and 3); a text counts until it ends.

Shadows: ``int8`` is rounded as by ``toy/quantize.py``, ``nf4`` as by bitsandbytes (blocks of 64 with their greatest
value, the scales left as they are); both compute in float32. ``fp16`` has the model's weights, which are bfloat16, and
rounds what each operation gives: the residual stream, norms, projections, keys and values, attention's and each
expert's output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import RESULTS, ROOT, Script, provenance, show, write_result
from benchmarks.real import held
from benchmarks.real.fit.llama import Shape, normed, rotated
from benchmarks.toy import quantize

TARGET = Path(".cache") / "real" / "target"  # from the checkout's root
NEVER = 1 << 30  # a period that is never over
PERIODS = (1, 2, 4, 8, 16)
BLOCK = 32  # tokens whose recall is averaged, to show a decay
ROWS = 120  # shadows that run at a time: each keeps 28 MB of keys and values
NF4 = (  # QLoRA, appendix E
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
app = Script(__doc__)


class Pair(NamedTuple):
    """Tokens between alignments of tokens, and of keys and values; ``NEVER``: not even at the first token."""

    tokens: int
    kv: int

    def __str__(self) -> str:
        return ", ".join("never" if period == NEVER else str(period) for period in self)


OTHERS = [Pair(1, 1), Pair(1, NEVER), Pair(NEVER, 1), Pair(NEVER, NEVER)]
PAIRS = {"int8": [Pair(t, kv) for t in PERIODS for kv in PERIODS] + [Pair(1, 32), *OTHERS[1:]]}


# -- the network -------------------------------------------------------------------------------------------------------


def int8(weight: Tensor) -> Tensor:
    """Rounds [N, K] to INT8 as a quantised checkpoint has it, and back to float32."""
    codes, scale = quantize.rounded(weight, 8)
    return (codes.float() * scale).flatten(1)


def nf4(weight: Tensor) -> Tensor:
    """Rounds [N, K] to 4-bit NormalFloat, blocks of 64 values with their greatest as scale, and back to float32."""
    blocks = weight.float().reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12)
    codes = torch.tensor(NF4)
    ends = (codes[1:] + codes[:-1]) / 2
    return (codes[torch.bucketize(blocks / scale, ends)] * scale).view(weight.shape)


def sampled(logits: Tensor, temperature: float, place: int) -> Tensor:
    """Returns a token of each row of logits [rows, V], with the same Gumbel noise at the same place."""
    seeded = torch.Generator().manual_seed(place)
    return (logits - temperature * torch.empty(logits.shape[-1]).exponential_(generator=seeded).log()).argmax(-1)


SHADOWS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor] | None]] = {
    "fp16": (torch.float16, None),
    "int8": (torch.float32, int8),
    "nf4": (torch.float32, nf4),
}


class MoE:
    """The carved model in plain torch, one token after another.

    Args:
        weights: of its checkpoint; linear layers but the routers and the output are rounded.
        config: its ``config.json``.
        dtype: to which the result of each operation is rounded; sums are in float32.
        rounded: what becomes of a weight [N, K].
        temperature: 0 writes greedily.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        config: dict[str, Any],
        dtype: torch.dtype = torch.float32,
        rounded: Callable[[Tensor], Tensor] | None = None,
        temperature: float = 0.0,
    ) -> None:
        self.shape, self._temperature = Shape.of(config), temperature
        self.top_k, self.experts = config["num_experts_per_tok"], config["n_routed_experts"]

        def weight(name: str) -> Tensor:
            found = weights[f"{name}.weight"]
            return (rounded(found) if rounded and quantize.is_rounded(f"{name}.weight") else found).float()

        self._rounded = (lambda x: x) if dtype == torch.float32 else lambda x: x.to(dtype).float()

        self._embedding, self._head, self._norm = map(weight, ("model.embed_tokens", "lm_head", "model.norm"))
        self._layers = [self._layer(f"model.layers.{number}.", weight) for number in range(self.shape.layers)]

    def _layer(self, prefix: str, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
        experts = [f"{prefix}mlp.experts.{number}." for number in range(self.experts)] + [
            f"{prefix}mlp.shared_experts."
        ]
        found = {
            "attention_norm": weight(f"{prefix}input_layernorm"),
            "ffn_norm": weight(f"{prefix}post_attention_layernorm"),
            "qkv": torch.cat([weight(f"{prefix}self_attn.{part}_proj") for part in "qkv"]),
            "o": weight(f"{prefix}self_attn.o_proj"),
            "router": weight(f"{prefix}mlp.gate"),
        }
        ups = [torch.cat([weight(f"{each}{part}_proj") for part in ("gate", "up")]) for each in experts]
        downs = [weight(f"{each}down_proj") for each in experts]
        return found | {
            "shared_up": ups.pop(),
            "shared_down": downs.pop(),
            "up": torch.stack(ups),
            "down": torch.stack(downs),
        }

    def empty(self, rows: int, length: int) -> Tensor:
        """Returns keys and values for ``rows`` texts of ``length`` tokens, [L, 2, rows, h, length, d]."""
        shape = self.shape
        return torch.zeros(shape.layers, 2, rows, shape.kv_heads, length, shape.head)

    @torch.inference_mode()
    def read(self, ids: Tensor, kept: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Reads ids [rows, n] at the places from ``start`` on; n is 1 unless ``start`` is 0.

        Returns:
            The token [rows] that it would write next, and the experts of each place, uint8 [L, rows, n, k].
        """
        shape, (rows, count) = self.shape, ids.shape
        stop = start + count
        frequency = 1.0 / shape.theta ** (torch.arange(0, shape.head, 2).float() / shape.head)
        angles = torch.outer(torch.arange(start, stop).float(), frequency).repeat(1, 2)
        turns, low = (angles.cos(), angles.sin()), self._rounded
        later = torch.ones(count, stop, dtype=torch.bool).triu(start + 1)
        x, chosen = F.embedding(ids, self._embedding), []
        for layer, (keys, values) in zip(self._layers, kept, strict=True):
            heads = low(F.linear(self._normed(x, layer["attention_norm"]), layer["qkv"]))
            heads = heads.view(rows, count, -1, shape.head).transpose(1, 2)
            query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            keys[:, :, start:stop], values[:, :, start:stop] = low(rotated(key, *turns)), value
            grouped = low(rotated(query, *turns)).view(rows, shape.kv_heads, -1, count, shape.head)
            scores = (grouped.flatten(2, 3) @ keys[:, :, :stop].mT * shape.head**-0.5).unflatten(2, (-1, count))
            shares = scores.masked_fill(later, -torch.inf).softmax(-1)
            mixed = low(shares.flatten(2, 3) @ values[:, :, :stop]).view(rows, shape.heads, count, shape.head)
            x = low(x + low(F.linear(mixed.transpose(1, 2).reshape(x.shape), layer["o"])))
            added, experts = self._mixture(layer, self._normed(x, layer["ffn_norm"]).flatten(0, 1))
            x = low(x + added.view_as(x))
            chosen.append(experts.view(rows, count, -1))
        logits = F.linear(self._normed(x[:, -1], self._norm), self._head)
        return sampled(logits, self._temperature, stop), torch.stack(chosen).to(torch.uint8)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rounded(normed(x, weight, self.shape.epsilon))

    def _mixture(self, layer: dict[str, Tensor], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The FFN's output [rows, d], and its experts [rows, k]; their weights sum to 1."""
        low = self._rounded
        best = low(F.linear(hidden, layer["router"])).topk(self.top_k)
        weights = best.values.softmax(-1).flatten()
        found = low(self._ffn(hidden, layer["shared_up"], layer["shared_down"]))
        order = best.indices.flatten().argsort()
        ends = torch.bincount(best.indices.flatten(), minlength=self.experts).tolist()
        for expert, places in enumerate(order.split(ends)):
            if len(places):
                rows = places // self.top_k
                out = self._ffn(hidden[rows], layer["up"][expert], layer["down"][expert])
                found.index_add_(0, rows, low(out) * weights[places, None])
        return low(found), best.indices

    def _ffn(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, wide = self._rounded(F.linear(x, up)).chunk(2, -1)
        return F.linear(self._rounded(F.silu(gate) * wide), down)


# -- the model and its shadows -----------------------------------------------------------------------------------------


class Written(NamedTuple):
    """What the model wrote.

    Attributes:
        ids: [q, P + n], prompts and what follows.
        chosen: uint8 [L, q, n, k], experts of each token after the prompt.
        kept: keys and values of all tokens.
        counts: bool [q, n], tokens up to the end of each text.
    """

    ids: Tensor
    chosen: Tensor
    kept: Tensor
    counts: Tensor


def written(model: MoE, prompts: Tensor, new: int, ends: Sequence[int]) -> Written:
    """Lets ``model`` write ``new`` tokens behind prompts [q, P]; a text ends with a token of ``ends``."""
    start = prompts.shape[1]
    kept, ids, chosen = model.empty(len(prompts), start + new), prompts, []
    token, _ = model.read(prompts, kept, 0)
    for place in range(start, start + new):
        ids = torch.cat([ids, token[:, None]], 1)
        token, experts = model.read(token[:, None], kept, place)
        chosen.append(experts)
    over = torch.isin(ids[:, start:], torch.tensor(ends)).cumsum(1)
    return Written(ids, torch.cat(chosen, 2), kept, over == 0)


def followed(shadow: MoE, theirs: Written, prompt: int, pairs: Sequence[Pair]) -> Tensor:
    """Returns how many experts of each place the shadow named, over k, float32 [pairs, q, n], as a mean over layers.

    All pairs of periods run beside one another, each with keys and values of its own.
    """
    count, (texts, length) = len(pairs), theirs.ids.shape
    first = shadow.empty(texts, prompt)
    own, _ = shadow.read(theirs.ids[:, :prompt], first, 0)
    kept = shadow.empty(count * texts, length)
    kept[:, :, :, :, :prompt] = first.repeat(1, 1, count, 1, 1, 1)
    own, truth, found = own.repeat(count), theirs.ids.repeat(count, 1), []
    period = torch.tensor([pair.tokens for pair in pairs]).repeat_interleave(texts)
    for place in range(prompt, length):
        since = place - prompt  # tokens written before
        for number, pair in enumerate(pairs):
            if pair.kv != NEVER and since % pair.kv == 0:
                rows = slice(number * texts, (number + 1) * texts)
                new = slice(place - pair.kv if since else 0, place)
                kept[:, :, rows, :, new] = theirs.kept[:, :, :, :, new]
        aligned = (period != NEVER) & (since % period == 0)
        own, chosen = shadow.read(torch.where(aligned, truth[:, place], own)[:, None], kept, place)
        right = theirs.chosen[:, :, since].repeat(1, count, 1)
        found.append((chosen[:, :, 0, :, None] == right[:, :, None]).any(-1).float().mean((0, 2)))
    return torch.stack(found, 1).view(count, texts, -1)


def recalls(named: Tensor, counts: Tensor) -> dict[str, Any]:
    """Returns recall (equation 3), and that of each ``BLOCK`` tokens (equation 2): named [q, n], counts bool [q, n]."""
    parts = zip(named.split(BLOCK, 1), counts.split(BLOCK, 1), strict=True)
    return {
        "recall": float(named[counts].mean()),
        "by_token": [float(each[part].mean()) for each, part in parts if part.any()],
    }


def repeated(ids: Tensor, size: int = 8) -> float:
    """Returns the share of places of ids [q, n] whose last ``size`` tokens stand earlier in the same text."""
    again = total = 0
    for text in ids.tolist():
        seen = set()
        for start in range(len(text) - size + 1):
            piece = tuple(text[start : start + size])
            again, total = again + (piece in seen), total + 1
            seen.add(piece)
    return again / total


@app.main
def main(
    texts: Annotated[int, typer.Option(min=1, help="Texts that the model writes, of all kinds in turn.")] = 2,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens before each, of held-out texts.")] = 64,
    new: Annotated[int, typer.Option(min=1, help="Tokens that the model writes.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.7,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_shadow.json",
) -> None:
    origin, folder = provenance(), ROOT / TARGET
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    windows = held.windows(held.beside(folder)[1:], "held", texts, prompt)  # no chats, which end soon
    begins = torch.tensor([each["prompt_token_ids"] for each in windows])
    theirs = written(MoE(weights, config, temperature=temperature), begins, new, ends)
    lengths, again = theirs.counts.sum(1).tolist(), repeated(theirs.ids[:, prompt:])
    print(f"the model wrote {lengths} tokens, {again:.2f} of them as before", flush=True)
    found: dict[str, Any] = {}
    for name, (dtype, rounded) in SHADOWS.items():
        shadow, pairs = MoE(weights, config, dtype, rounded, temperature), PAIRS.get(name, OTHERS)
        named, each = [], max(1, ROWS // len(pairs))
        for start in range(0, texts, each):
            some = slice(start, start + each)
            part = Written(theirs.ids[some], theirs.chosen[:, some], theirs.kept[:, :, some], theirs.counts[some])
            named.append(followed(shadow, part, prompt, pairs))
            print(f"{name}: {min(texts, start + each)} of {texts} texts", flush=True)
        whole = torch.cat(named, 1)
        found[name] = {str(pair): recalls(whole[place], theirs.counts) for place, pair in enumerate(pairs)}
    result = {
        "provenance": origin,
        "toy_model": False,
        "texts": {"files": texts, "prompt": prompt, "written": lengths, "repeated": again}
        | {"temperature": temperature},
        "block": BLOCK,
        "chance": theirs.chosen.shape[-1] / config["n_routed_experts"],
        "shadows": found,
    }
    write_result(output, result)
    rows = [{"shadow": name, "tokens, KV": pair} | one for name, of in found.items() for pair, one in of.items()]
    show("recall", rows, "shadow", "tokens, KV", "recall")


if __name__ == "__main__":
    app()
