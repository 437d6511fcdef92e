"""Lets the carved model speak, in stock vLLM: what a drafter of it learns from.

    python benchmarks/real/fit/rolls.py --target DIR/target --texts texts.safetensors --texts chats.safetensors \
        --output rolls.safetensors --minutes 30

Prompts are windows of 16 to 256 tokens of every kind of text, and questions that the model asks itself. Half of the
answers are greedy, the others sampled. What was said so far is written after each round, so that a run may be stopped;
another ``--seed`` says something else. ``--side held`` asks what nothing is fitted on, greedily.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import held
from held import chats

LENGTH = 512  # tokens of a window, with its prompt
PROMPTS = (16, 256)  # tokens of the shortest and the longest
GREEDY = 192  # tokens that are said greedily at most: so small a model soon repeats itself
QUESTION = 96
TEMPERATURES = (0.7, 1.0)  # of those that sample, and of questions
ROUND = 256  # windows that vLLM runs at once

console = Console(highlight=False)


@dataclass(frozen=True)
class Rolls:
    """Windows that begin with a prompt and go on with what the target said.

    Attributes:
        ids: of all windows, one after another, int32 [tokens].
        ends: of each window in ``ids``, int64 [windows].
        begun: tokens of each window's prompt, int64 [windows].
    """

    ids: Tensor
    ends: Tensor
    begun: Tensor

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
    target: Annotated[Path, typer.Option(help="the carved model's folder, as build.py writes it")],
    texts: Annotated[list[Path], typer.Option(help="files of texts.py and chats.py; may be given several times")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    minutes: Annotated[float, typer.Option(help="how long to speak")] = 30.0,
    side: Annotated[str, typer.Option(help="of the texts: fit, or held, of which everything is greedy")] = "fit",
    count: Annotated[int, typer.Option("--windows", help="windows at most")] = 1_000_000,
    seed: Annotated[int, typer.Option(help="which prompts")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 is faster on a CPU without bfloat16")] = "bfloat16",
) -> None:
    from vllm import LLM, SamplingParams

    begun, draw = time.monotonic(), random.Random(seed)
    found = held.texts(texts, side)
    llm = LLM(
        str(target),
        dtype=dtype,
        max_model_len=LENGTH,
        max_num_seqs=ROUND,
        seed=seed,
        kv_cache_memory_bytes=6 << 30,
    )
    tokenizer = llm.get_tokenizer()

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def said(asked: list[list[int]], parameters: list[Any]) -> list[list[int]]:
        requests = [{"prompt_token_ids": ids} for ids in asked]
        return [list(one.outputs[0].token_ids) for one in llm.generate(requests, parameters, use_tqdm=False)]

    def questions(number: int) -> list[list[int]]:
        if side == "held":
            return [encoded(chats.begun(question)) for question in chats.HELD_QUESTIONS]
        start = [encoded(chats.SYSTEM + chats.USER)] * number
        sampling = SamplingParams(temperature=TEMPERATURES[1], max_tokens=QUESTION)
        asked = (tokenizer.decode(ids, skip_special_tokens=True) for ids in said(start, [sampling] * number))
        return [encoded(chats.begun(question)) for question in asked if question.strip()]

    def answering(number: int, length: int) -> Any:
        if side == "held" or number % 2:
            return SamplingParams(temperature=0.0, max_tokens=min(GREEDY, LENGTH - length))
        return SamplingParams(temperature=draw.choice(TEMPERATURES), max_tokens=LENGTH - length)

    windows: list[tuple[list[int], list[int]]] = []
    while len(windows) < count and time.monotonic() - begun < minutes * 60:
        size = min(ROUND, count - len(windows))
        asked = prompts(found, questions(-(-size // (len(found) or 1))), size, draw)
        ways = [answering(number, len(ids)) for number, ids in enumerate(asked)]
        windows += [pair for pair in zip(asked, said(asked, ways), strict=True) if len(pair[1]) > 1]
        Rolls.of(windows).save(output)
        tokens, seconds = sum(len(more) for _, more in windows), time.monotonic() - begun
        console.print(f"{len(windows):6} windows  {tokens:9,} tokens said  {tokens / seconds:6.0f} a second")
    lengths = np.array([len(more) for _, more in windows])
    console.print(f"{output}: from {lengths.min()} to {lengths.max()} tokens said, {lengths.mean():.0f} on average")


if __name__ == "__main__":
    typer.run(main)
