"""Chats to fit on, sampled from the dense model itself: it writes the questions too. Judged by questions written here.

python benchmarks/real/fit/chats.py --dense DIR/dense --output chats.safetensors

"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"

HELD_QUESTIONS = (
    "What is the capital of France, and why is it famous?",
    "Write a Python function that reverses a string, and explain it.",
    "Tell me a short story about a fox and a crow.",
    "How do plants make their food?",
    "Give me three tips for learning to swim.",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite email asking for a day off.",
    "Why is the sky blue?",
    "How does a refrigerator keep food cold?",
    "Write a haiku about autumn leaves.",
    "What should I pack for a weekend in the mountains?",
    "Explain what a database index is to a beginner.",
    "Who was Marie Curie?",
    "Suggest a vegetarian dinner for four people.",
    "How do I remove a file from a Git repository but keep it on disk?",
    "What are the planets of the solar system, in order?",
    "Summarise the story of Romeo and Juliet in five sentences.",
    "How can I sleep better at night?",
    "Write a SQL query that counts the orders of each customer.",
    "Why do cats purr?",
)
ROUNDS = 3  # sampled answers to each held question

console = Console()


def begun(question: str) -> str:
    """A question in the chat template, up to where its answer begins."""
    return SYSTEM + USER + question.strip() + END + ASSISTANT


def main(
    dense: Annotated[Path, typer.Option(help="the dense model's folder")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write: chat.fit and chat.held, int32 [tokens]")],
    chats: Annotated[int, typer.Option(help="how many chats to fit on")] = 600,
    seed: Annotated[int, typer.Option(help="seed of the sampling")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 is faster on a CPU without bfloat16")] = "bfloat16",
) -> None:
    from vllm import LLM, SamplingParams  # not where the questions alone are wanted

    llm = LLM(
        str(dense),
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=64,
        seed=seed,
        enforce_eager=True,
        kv_cache_memory_bytes=2 << 30,
    )
    tokenizer = llm.get_tokenizer()

    def sampled(prompts: list[str], temperature: float, length: int) -> list[str]:
        # No seed of its own for each: on a CPU vLLM 0.32 cannot rewind one after a prefill in parts.
        parameters = SamplingParams(temperature=temperature, max_tokens=length)
        return [request.outputs[0].text for request in llm.generate(prompts, parameters)]

    questions = sampled([SYSTEM + USER] * chats, 0.9, 96)
    tensors = {}
    for side, asked in (("fit", questions), ("held", list(HELD_QUESTIONS) * ROUNDS)):
        starts = list(map(begun, asked))
        answers = sampled(starts, 0.7, 256)
        texts = [start + answer + END for start, answer in zip(starts, answers, strict=True)]
        ids = [token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        tensors[f"chat.{side}"] = torch.tensor(ids, dtype=torch.int32)
        console.print(f"chat {side:5} {len(texts):5} chats {len(ids):8,} tokens; one of them:\n{texts[-1]}")
    save_file(tensors, output)


if __name__ == "__main__":
    typer.run(main)
