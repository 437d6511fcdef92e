"""What each drafter would draft behind every token of what the carved model says, and the experts of every draft.

    python benchmarks/real/fit/chains.py --dense .cache/real/dense --output .cache/real/chains.safetensors

Greedy drafts depend on the text before them alone. So a chain behind each place says what any choice of drafts would
have met. All in plain torch: a chain's rows attend to the text up to their place and to the chain itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.real import artefact, held
from benchmarks.real.fit.carved import CarvedLayer, carved_layers
from benchmarks.real.fit.eagle import Eagle, attended
from benchmarks.real.fit.llama import COMPUTE, FFN, Kept, Llama, normed, rotated
from benchmarks.real.fit.rolls import Way, said

UNKNOWN = -1  # in place of a draft where n-grams find none
LOOKUP = 4, 2  # tokens that an n-gram has, at most and at least
DRAFTERS = ("ngram", "eagle3", "dense")


class Chains(NamedTuple):
    """Chains of one drafter behind each place of a text.

    Attributes:
        drafts: int64 [places, K]; ``UNKNOWN`` where there is none.
        chances: the drafter's probability of each, float32 [places, K]; NaN of n-grams.
        right: whether the target says the same there, bool [places, K].
        experts: of the token that is verified and of each draft, uint8 [places, K + 1, layers, top_k].
    """

    drafts: Tensor
    chances: Tensor
    right: Tensor
    experts: Tensor


class _Text:
    """A text [1, tokens] as one of the two models reads it: its keys and values, and the streams that a head reads."""

    def __init__(self, model: Llama, ids: Tensor, ffn: FFN, depths: tuple[int, ...] = ()) -> None:
        self.kept = Kept(model.shape, *ids.shape)
        streams = list(model.streams(ids, ffn, self.kept))
        self.streams = torch.stack([streams[depth] for depth in depths], 2) if depths else None


class _Rows:
    """Chains behind each of ``places`` [P] of a text, read one row at a time."""

    def __init__(self, model: Llama, text: _Text, places: Tensor, ffn: FFN) -> None:
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
    model: Llama, layers: list[CarvedLayer], head: Eagle, prompt: Tensor, answer: Tensor, most: int
) -> dict[str, Chains]:
    """The chains of each of ``DRAFTERS`` behind a prompt [prompt] and each token of what the target says [tokens].

    Args:
        most: K, drafts of a chain; none is behind the last K + 1 tokens.
    """
    chosen: list[Tensor] = []

    def carved(number: int, h: Tensor) -> Tensor:
        layer = layers[number]
        chosen.append(layer.logits(h).topk(layer.top_k).indices.to(torch.uint8))
        return layer(h)

    ids, length = torch.cat([prompt, answer])[None], len(prompt) + len(answer)
    target, parent = _Text(model, ids, carved, head.depths), _Text(model, ids, model.ffn)
    places = torch.arange(len(prompt) - 1, length - most - 2)
    goals = torch.stack([ids[0, places + 2 + step] for step in range(most)], 1)
    found = {
        "ngram": _looked_up(ids[0], places, most),
        "eagle3": _by_head(head, model, ids, target.streams, places, most),
        "dense": _by_model(model, model.ffn, parent, ids[0, places + 1], places, most),
    }
    every = {}
    for name, (drafts, chances) in found.items():
        rows, experts = _Rows(model, target, places, carved), []
        for token in (ids[0, places + 1], *drafts.clamp(min=0).unbind(1)):
            chosen.clear()
            rows.read(token)
            experts.append(torch.stack(chosen, 1))
        every[name] = Chains(drafts, chances, drafts == goals, torch.stack(experts, 1))
    return every


def _by_model(model: Llama, ffn: FFN, text: _Text, tokens: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What a model drafts behind ``tokens`` [P], which follow ``places`` [P], and its probabilities: both [P, most]."""
    rows, best = _Rows(model, text, places, ffn), []
    for _ in range(most):
        best.append(model.logits(rows.read(tokens)).softmax(-1).max(-1))
        tokens = best[-1].indices
    return torch.stack([each.indices for each in best], 1), torch.stack([each.values for each in best], 1)


def _by_head(
    head: Eagle, model: Llama, ids: Tensor, streams: Tensor | None, places: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    assert streams is not None
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
        x, q, k, v = head.begun(F.embedding(drafts[-1][None], model.embedding), x, rows)
        own.append((k, v))
        x = head.finished(x, attended(q, keys, values, own, later))
    return torch.stack(drafts, 1), torch.stack(chances, 1)


def _looked_up(ids: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Behind the first earlier place with the same last tokens, as many of these as possible."""
    found = torch.full((len(places), most), UNKNOWN)
    for number, place in enumerate(places.tolist()):
        text = ids[: place + 2].tolist()
        for size in range(LOOKUP[0], LOOKUP[1] - 1, -1):
            starts = (start for start in range(len(text) - size) if text[start : start + size] == text[-size:])
            if (start := next(starts, None)) is not None:
                behind = text[start + size :][:most]
                found[number, : len(behind)] = torch.tensor(behind)
                break
    return found, torch.full(found.shape, torch.nan)


def read(path: Path) -> dict[str, list[Chains]]:
    """Drafter -> the chains of each text, of a file that ``main`` wrote."""
    tensors = load_file(path)
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    return {
        drafter: [
            Chains(*(tensors[f"{number}.{drafter}.{part}"] for part in Chains._fields)) for number in range(count)
        ]
        for drafter in DRAFTERS
    }


def main(
    dense: Annotated[Path, typer.Option(help="the dense model's folder, as build.py writes it; texts lie beside it")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    count: Annotated[int, typer.Option("--prompts", help="of all kinds in turn")] = 20,
    prompt_tokens: Annotated[int, typer.Option(help="of a prompt")] = 64,
    tokens: Annotated[int, typer.Option(help="that the target says after each")] = 128,
    most: Annotated[int, typer.Option(help="drafts of a chain")] = 4,
    seed: Annotated[int, typer.Option(help="which prompts")] = 5,
) -> None:
    model = Llama(dense)
    layers = carved_layers(model, artefact.PATH)
    head = Eagle.of(model, artefact.load_head().weights, artefact.load_vocabulary())
    tensors: dict[str, Tensor] = {}
    prompts = [torch.tensor(ids) for ids in held.prompts(dense, held.beside(dense), count, prompt_tokens, seed)]
    answers = said(model, lambda number, h: layers[number](h), prompts, [Way(tokens + most + 1)] * count)
    pairs = zip(prompts, answers, strict=True)
    for number, pair in enumerate(track(pairs, "drafting", total=count, console=Console(stderr=True))):
        for name, found in chains(model, layers, head, *pair, most).items():
            tensors |= {f"{number}.{name}.{part}": tensor.contiguous() for part, tensor in found._asdict().items()}
    save_file(tensors, output)


if __name__ == "__main__":
    typer.run(main)
