"""Lets the carved model speak: what a drafter of it learns from.

    python benchmarks/real/fit/rolls.py --dense DIR/dense --texts texts.safetensors --texts chats.safetensors \
        --output rolls.safetensors --minutes 30

Prompts are windows of 16 to 256 tokens of every kind of text, and questions that the model asks itself. Half of the
answers are greedy, the others sampled. What was said is written after every ``BATCH`` windows, so that a run may be
stopped; another ``--seed`` says something else. ``--side held`` asks what ``accept.py`` asks an engine, of texts that
nothing is fitted on, so that a head is judged by what an engine would count. In plain torch, as a dense model whose
neurons have weights, since vLLM on a CPU says half as many tokens a second.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.real import artefact, held
from benchmarks.real.fit.carved import carved_layers
from benchmarks.real.fit.llama import FFN, Kept, Llama
from benchmarks.real.held import chats

LENGTH = 512  # tokens of a window, with its prompt
PROMPTS = (16, 256)  # tokens of the shortest and the longest
GREEDY = 192  # tokens that are said greedily at most: so small a model soon repeats itself
QUESTION = 96
HELD = 60, 96, 64  # prompts, their tokens at most, and tokens that are said: those of benchmarks/pages/acceptance
TEMPERATURES = (0.7, 1.0)  # of those that sample, and of questions
BATCH, ROUND = 128, 1024  # windows that advance together, and of which the prompts of a batch are alike in length
ENDS = (0, 2)  # of a text, and of a turn
IDLE = 8  # the part of a batch that has ended, as a divisor, when the others go on without it

console = Console(highlight=False)


class Way(NamedTuple):
    """How an answer is said: ``most`` tokens at most, greedily at temperature 0."""

    most: int
    temperature: float = 0.0


@torch.inference_mode()
def said(
    model: Llama, ffn: FFN, asked: list[Tensor], ways: list[Way], ends: tuple[int, ...] = (), seed: int = 0
) -> list[Tensor]:
    """What a model says after each of the prompts ``asked`` [its tokens]: int64 [tokens] each, up to one of ``ends``.

    All advance together, token by token, from the end of the shortest prompt.
    """
    generator, known = torch.Generator().manual_seed(seed), torch.tensor(ends, dtype=torch.int64)
    begins = torch.tensor([len(prompt) for prompt in asked])
    stops = begins + torch.tensor([way.most for way in ways])
    heat = torch.tensor([way.temperature for way in ways])
    ids = torch.zeros(len(asked), int(stops.max()) + 1, dtype=torch.int64)
    for row, prompt in zip(ids, asked, strict=True):
        row[: len(prompt)] = prompt
    rows, begin, end = torch.arange(len(asked)), 0, int(begins.min())
    kept = Kept(model.shape, len(rows), ids.shape[1])
    while len(rows):
        final = model.hidden(ids[rows, begin:end], ffn, kept)[:, -1]
        begin, end = end, end + 1
        speaking = begin >= begins[rows]
        talking = rows[speaking]
        ids[talking, begin] = chosen(model.logits(final[speaking]), heat[talking], generator)
        ended = talking[torch.isin(ids[talking, begin], known)]
        stops[ended] = stops[ended].clamp(max=end)
        over = end >= stops[rows]
        if over.sum() * IDLE >= len(rows):
            kept.select((~over).nonzero()[:, 0])
            rows = rows[~over]
    return [row[begin:stop].clone() for row, begin, stop in zip(ids, begins, stops, strict=True)]


def chosen(logits: Tensor, heat: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row, int64 [rows], of logits [rows, vocabulary] and temperatures [rows]; the likeliest at 0."""
    tokens, warm = logits.argmax(-1), heat > 0
    if warm.any():
        odds = (logits[warm] / heat[warm, None]).softmax(-1).cumsum(-1)
        drawn = torch.rand(len(odds), 1, generator=generator) * odds[:, -1:]
        tokens[warm] = torch.searchsorted(odds, drawn)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens


@dataclass(frozen=True)
class Rolls:
    """Windows that begin with a prompt and go on with what the target said."""

    ids: Tensor  # of all windows, one after another, int32 [tokens]
    ends: Tensor  # of each window in ``ids``, int64 [windows]
    begun: Tensor  # tokens of each window's prompt, int64 [windows]

    def __len__(self) -> int:
        return len(self.ends)

    def window(self, number: int) -> tuple[Tensor, int]:
        """The token ids of a window, int64 [tokens], and how many of them are its prompt."""
        start = int(self.ends[number - 1]) if number else 0
        return self.ids[start : int(self.ends[number])].long(), int(self.begun[number])

    @classmethod
    def of(cls, windows: list[tuple[list[int], list[int]]]) -> Rolls:
        """Of pairs: the tokens of a prompt, and of what was said."""
        lengths = torch.tensor([len(prompt) + len(said) for prompt, said in windows], dtype=torch.int64)
        ids = [token for prompt, said in windows for token in (*prompt, *said)]
        begun = torch.tensor([len(prompt) for prompt, _ in windows], dtype=torch.int64)
        return cls(torch.tensor(ids, dtype=torch.int32), lengths.cumsum(0), begun)

    @classmethod
    def load(cls, paths: list[Path]) -> Rolls:
        """Reads files that ``save`` wrote, one after another."""
        ids, ends, begun, offset = [], [], [], 0
        for path in paths:
            with safe_open(path, "pt") as file:
                ids.append(file.get_tensor("ids"))
                ends.append(file.get_tensor("ends") + offset)
                begun.append(file.get_tensor("begun"))
            offset += len(ids[-1])
        return cls(torch.cat(ids), torch.cat(ends), torch.cat(begun))

    def save(self, path: Path) -> None:
        scratch = path.with_name(f"{path.name}.part")
        save_file({"ids": self.ids, "ends": self.ends, "begun": self.begun}, scratch)
        scratch.replace(path)


def prompts(
    texts: dict[str, np.ndarray], questions: list[list[int]], count: int, draw: random.Random
) -> list[list[int]]:
    """``count`` prompts of all kinds in turn: windows of ``texts``, kind -> ids [tokens], and ``questions``."""
    kinds, found = ["chat"] * bool(questions) + [kind for kind in texts if kind != "chat"], []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        if kind == "chat":
            found.append(questions[number // len(kinds) % len(questions)])
            continue
        length = draw.randint(*PROMPTS)
        start = draw.randrange(len(texts[kind]) - length)
        found.append(texts[kind][start : start + length].tolist())
    return found


def main(
    dense: Annotated[Path, typer.Option(help="the dense model's folder, as build.py writes it")],
    texts: Annotated[list[Path], typer.Option(help="files of texts.py and chats.py; may be given several times")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    artefact_path: Annotated[Path, typer.Option("--artefact", help="what makes the target of it")] = artefact.PATH,
    minutes: Annotated[float, typer.Option(help="how long to speak")] = 30.0,
    side: Annotated[str, typer.Option(help="of the texts: fit, or held")] = "fit",
    count: Annotated[int, typer.Option("--windows", help="windows at most")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="which prompts")] = 0,
) -> None:
    begun, draw = time.monotonic(), random.Random(seed)
    found, model = held.texts(texts, side), Llama(dense)
    layers, tokenizer = carved_layers(model, artefact_path), Tokenizer.from_file(str(dense / "tokenizer.json"))

    def answers(asked: list[list[int]], ways: list[Way], ends: tuple[int, ...] = ENDS) -> list[list[int]]:
        tensors = [torch.tensor(ids) for ids in asked]
        spoken = said(model, lambda number, h: layers[number](h), tensors, ways, ends, draw.randrange(1 << 32))
        return [ids.tolist() for ids in spoken]

    if side == "held":
        number, longest, most = HELD
        asked = held.prompts(dense, texts, number, longest, seed)
        Rolls.of([*zip(asked, answers(asked, [Way(most)] * number, ()), strict=True)]).save(output)
        return

    def questions(number: int) -> list[list[int]]:
        start = tokenizer.encode(chats.SYSTEM + chats.USER, add_special_tokens=False).ids
        spoken = answers([start] * number, [Way(QUESTION, TEMPERATURES[1])] * number)
        asked = [text for ids in spoken if (text := tokenizer.decode(ids).strip())]
        return [tokenizer.encode(chats.begun(text), add_special_tokens=False).ids for text in asked]

    def way(number: int, length: int) -> Way:
        if number % 2:
            return Way(min(GREEDY, LENGTH - length))
        return Way(LENGTH - length, draw.choice(TEMPERATURES))

    windows: list[tuple[list[int], list[int]]] = []
    while len(windows) < count and time.monotonic() - begun < minutes * 60:
        size = min(ROUND, count - len(windows))
        asked = prompts(found, questions(min(BATCH, -(-size // len(found)))), size, draw)
        each = [(ids, way(number, len(ids))) for number, ids in enumerate(asked)]
        each.sort(key=lambda pair: (pair[1].temperature > 0, len(pair[0])))
        for first in draw.sample(starts := range(0, size, BATCH), len(starts)):
            batch, ways = zip(*each[first : first + BATCH], strict=True)
            windows += [pair for pair in zip(batch, answers([*batch], [*ways]), strict=True) if len(pair[1]) > 1]
            Rolls.of(windows).save(output)
            tokens, seconds = sum(len(more) for _, more in windows), time.monotonic() - begun
            console.print(f"{len(windows):6} windows  {tokens:9,} tokens said  {tokens / seconds:6.0f} a second")
            if time.monotonic() - begun > minutes * 60:
                break
    lengths = np.array([len(more) for _, more in windows])
    console.print(f"{output}: from {lengths.min()} to {lengths.max()} tokens said, {lengths.mean():.0f} on average")


if __name__ == "__main__":
    typer.run(main)
