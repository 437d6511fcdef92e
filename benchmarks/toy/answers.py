"""Writes a toy model's own answers, which its EAGLE-3 head is trained on: prompts of its training text, continued.

    python benchmarks/toy/answers.py benchmarks/toy/models/local/target answers.safetensors

Half of the answers are greedy, half are sampled at temperature 0.7, by stock vLLM.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Annotated

import streams
import torch
import typer
from safetensors.torch import save_file

TEMPERATURE = 0.7  # of every second answer


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    output: Annotated[Path, typer.Argument(help="File to write: tokens [count, prompt + answer].")],
    count: Annotated[int, typer.Option(min=2, help="Answers.")] = 1536,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 224,
    library: Annotated[bool, typer.Option("--library", help="Prompts of the standard library only.")] = False,
) -> None:
    """Generate and write the answers."""
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    train, _ = streams.library() if library else streams.kinds()
    prompts = [chunk[0].tolist() for chunk in islice(streams.mixed(train, 1, prompt_tokens - 1, seed=7), count)]
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=prompt_tokens + answer_tokens,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
    )
    common = {"max_tokens": answer_tokens, "ignore_eos": True, "detokenize": False}
    sampling = [
        SamplingParams(temperature=TEMPERATURE if number % 2 else 0, seed=number, **common) for number in range(count)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    rows = [[*ids, *answer.outputs[0].token_ids] for ids, answer in zip(prompts, outputs, strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": torch.tensor(rows)}, output)
    typer.echo(f"{count} answers of {answer_tokens} tokens: {output}")


if __name__ == "__main__":
    typer.run(main)
