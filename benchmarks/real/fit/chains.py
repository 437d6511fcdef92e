"""What each drafter would draft behind every token of what the target says, and the experts of every draft.

Greedy drafts depend on the text before them alone, so that a chain behind each place tells what any choice of drafts
would have met. All in torch; attention of a chain's rows is over the text up to its place and the chain itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.real.fit.carve import CarvedLayer, weights_of
from benchmarks.real.fit.drafter import attended
from benchmarks.real.fit.eagle import DEPTHS, Eagle
from benchmarks.real.fit.llama import COMPUTE, FFN, Kept, Llama, normed, rotated
from benchmarks.real.fit.rolls import Way, said

UNKNOWN = -1  # in place of a draft where n-grams find none
_LOOKUP = 4, 2  # tokens that an n-gram has, at most and at least


class Chains(NamedTuple):
    """Chains of one drafter behind each place of a text.

    Attributes:
        drafts: int64 [places, K]; ``UNKNOWN`` where there is none.
        chances: the drafter's probability of each, float32 [places, K]; NaN of n-grams.
        right: whether the target says the same there, bool [places, K].
        experts: of the token that is verified and of each draft, uint8 [places, K + 1, layers, top_k].
        named: those that the target's routers name while it drafts for itself, of each row that it reads, uint8
            [places, K, layers, top_k]; of other drafters [0].
    """

    drafts: Tensor
    chances: Tensor
    right: Tensor
    experts: Tensor
    named: Tensor


class Text:
    """A text [1, tokens] as one of the two models reads it: its keys and values, and the streams that a head reads."""

    def __init__(self, model: Llama, ids: Tensor, ffn: FFN) -> None:
        self.kept = Kept(model.shape, *ids.shape)
        streams = list(model.streams(ids, ffn, self.kept))
        self.streams = torch.stack([streams[depth] for depth in DEPTHS], 2)


class _Rows:
    """Chains behind each of ``places`` [P] of a text, read one row at a time."""

    def __init__(self, model: Llama, text: Text, places: Tensor, ffn: FFN) -> None:
        self._model, self._text, self._places, self._ffn = model, text, places, ffn
        self._own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]
        self._later = torch.arange(text.kept.length) > places[:, None]

    def read(self, tokens: Tensor) -> Tensor:
        """The residual stream [P, hidden] after the last layer, of the next token [P] of each chain."""
        model, shape = self._model, self._model.shape
        positions = self._places + 1 + len(self._own[0])
        cosines, sines = (table[positions][:, None] for table in model.rotations(int(positions.max()) + 1))
        x = F.embedding(tokens, model.embedding)
        for number, layer in enumerate(model.layers):
            heads = F.linear(normed(x, layer.attention_norm, shape.epsilon), layer.qkv).view(len(x), -1, shape.head)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            own = self._own[number]
            own.append((rotated(k, cosines, sines), v))
            x = x + F.linear(self._attended(number, rotated(q, cosines, sines), own), layer.o)
            x = x + self._ffn(number, model.ffn_input(number, x))
        return x

    def _attended(self, number: int, q: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        shape = self._model.shape
        groups = q.view(len(q), shape.kv_heads, -1, shape.head)
        before = torch.einsum("phgd,htd->phgt", groups, self._text.kept.keys[number, 0]).float()
        before = before.masked_fill(self._later[:, None, None], -torch.inf)
        behind = torch.stack([(groups * k[:, :, None]).sum(-1) for k, _ in own], -1).float()
        weights = (torch.cat([before, behind], -1) * shape.head**-0.5).softmax(-1).to(COMPUTE)
        length = before.shape[-1]
        mixed = torch.einsum("phgt,htd->phgd", weights[..., :length], self._text.kept.values[number, 0])
        for step, (_, v) in enumerate(own):
            mixed = mixed + weights[..., length + step, None] * v[:, :, None]
        return mixed.flatten(1)


@torch.inference_mode()
def chains(
    model: Llama,
    layers: list[CarvedLayer],
    head: Eagle,
    prompt: Tensor,
    tokens: int,
    most: int,
    shares: tuple[int, ...],
) -> dict[str, Chains]:
    """The chains of each drafter behind ``tokens`` tokens that the target says after a prompt [prompt].

    Args:
        most: K, drafts of a chain.
        shares: percent of the experts that are in slots while the target drafts for itself with these alone.
    """
    router = {number: layer.experts.router.to(COMPUTE) for number, layer in enumerate(layers)}
    top_k, chosen = layers[0].top_k, []

    def carved(number: int, h: Tensor) -> Tensor:
        chosen.append(F.linear(h, router[number]).float().topk(top_k).indices.to(torch.uint8))
        return layers[number](h)

    length = len(prompt) + tokens + most + 1
    ways = [Way(length - len(prompt))]
    ids = torch.cat([prompt, *said(model, lambda number, h: layers[number](h), [prompt], ways)])[None]
    target, dense = Text(model, ids, carved), Text(model, ids, model.ffn)
    routed = torch.stack([experts[0] for experts in chosen], 1)
    places = torch.arange(len(prompt) - 1, length - most - 2)
    goals = torch.stack([ids[0, places + 2 + step] for step in range(most)], 1)
    found = {
        "ngram": _looked_up(ids[0], places, most),
        "eagle3": _by_head(head, model, ids, target.streams, places, most),
        "dense": drafted(model, model.ffn, dense, ids[0, places + 1], places, most),
    }
    names = dict[str, Tensor]()
    for share in shares:
        held = resident(routed, len(router[0]), round(len(router[0]) * share / 100))[places + 1]

        def restricted(number: int, h: Tensor, held: Tensor = held) -> Tensor:
            carved(number, h)
            return _restricted(layers[number], h, held[:, number])

        chosen.clear()
        found[f"self{share}"] = drafted(model, restricted, target, ids[0, places + 1], places, most)
        names[f"self{share}"] = torch.stack(chosen, 1).unflatten(1, (most, -1))
    every = {}
    for name, (drafts, chances) in found.items():
        rows, experts = _Rows(model, target, places, carved), []
        for token in (ids[0, places + 1], *drafts.clamp(min=0).unbind(1)):
            chosen.clear()
            rows.read(token)
            experts.append(torch.stack(chosen, 1))
        named = names.get(name, torch.zeros(0, dtype=torch.uint8))
        every[name] = Chains(drafts, chances, drafts == goals, torch.stack(experts, 1), named)
    return every


def resident(routed: Tensor, experts: int, slots: int) -> Tensor:
    """What LRU slots of each layer hold before each token runs: bool [tokens, layers, experts].

    Args:
        routed: the experts of each token, [tokens, layers, top_k].
        experts: of a layer.
        slots: of a layer.
    """
    found = torch.zeros(*routed.shape[:2], experts, dtype=torch.bool)
    for layer in range(routed.shape[1]):
        held = OrderedDict.fromkeys(range(slots))
        for token, chosen in enumerate(routed[:, layer].tolist()):
            found[token, layer, list(held)] = True
            for expert in chosen:
                held[expert] = None
                held.move_to_end(expert)
            while len(held) > slots:
                held.popitem(last=False)
    return found


def _restricted(layer: CarvedLayer, h: Tensor, held: Tensor) -> Tensor:
    """The layer's output for rows h [rows, hidden] whose router chooses among the experts ``held`` [rows, experts]."""
    return layer.output(layer.neurons(h, lambda logits, k: weights_of(logits.masked_fill(~held, -torch.inf), k))[0])


def drafted(model: Llama, ffn: FFN, text: Text, tokens: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What a model drafts behind ``tokens`` [P], which follow ``places`` [P], and its probabilities: both [P, most]."""
    rows, best = _Rows(model, text, places, ffn), []
    for _ in range(most):
        best.append(model.logits(rows.read(tokens)).softmax(-1).max(-1))
        tokens = best[-1].indices
    return torch.stack([each.indices for each in best], 1), torch.stack([each.values for each in best], 1)


def _by_head(
    head: Eagle, model: Llama, ids: Tensor, streams: Tensor, places: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    every = torch.arange(ids.shape[1] - 1)
    before = head.read(streams[:, : len(every)])
    x, q, keys, values = head.begun(F.embedding(ids[:, 1:], model.embedding), before, every)
    x = head.finished(x, F.scaled_dot_product_attention(q, keys, values, is_causal=True))[:, places]
    own, later = list[tuple[Tensor, Tensor]](), every > places[:, None]
    drafts, chances = list[Tensor](), list[Tensor]()
    for step in range(most):
        best = head.logits(x).softmax(-1)[0].max(-1)
        drafts.append(head.vocabulary[best.indices])
        chances.append(best.values)
        rows = places + step + 1
        x, q, k, v = head.begun(F.embedding(drafts[-1][None], model.embedding), head.left(x), rows)
        own.append((k, v))
        x = head.finished(x, attended(q, keys, values, own, later))
    return torch.stack(drafts, 1), torch.stack(chances, 1)


def _looked_up(ids: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Behind the first earlier place with the same last tokens, as many of these as possible."""
    found = torch.full((len(places), most), UNKNOWN)
    for number, place in enumerate(places.tolist()):
        text = ids[: place + 2].tolist()
        for size in range(_LOOKUP[0], _LOOKUP[1] - 1, -1):
            starts = (start for start in range(len(text) - size) if text[start : start + size] == text[-size:])
            if (start := next(starts, None)) is not None:
                behind = text[start + size :][:most]
                found[number, : len(behind)] = torch.tensor(behind)
                break
    return found, torch.full(found.shape, torch.nan)
