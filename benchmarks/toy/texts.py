"""Writes texts for ``vllm-spac quality`` with the toy model, as JSON lines of token ids.

    python benchmarks/toy/texts.py calibration.jsonl --training --count 80
    python benchmarks/toy/texts.py held-out.jsonl --count 20

Each is the middle of a library file, at most one per file. Held-out files are those that training never saw.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from benchmarks.real import held
from benchmarks.toy import corpus

TARGET = Path(__file__).parent / "models" / "target"


def chosen(training: bool, count: int, length: int, model: Path = TARGET) -> list[dict]:
    """Returns ``count`` files, spread evenly over those that are long enough: {"file", "prompt_token_ids"}.

    Of the carved model they are windows of the texts beside it, and "file" is their kind.
    """
    if files := held.beside(model):
        return held.windows(files, "fit" if training else "held", count, length)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    paths = [p for p in corpus.files() if corpus.is_held_out(p) != training and "test" not in p.parts]
    for path in paths:
        ids = tokenizer.encode(corpus.read(path)).ids
        if len(ids) >= 2 * length:
            middle = len(ids) // 2
            ids = ids[middle - length // 2 : middle + length - length // 2]
            found.append({"file": str(path.relative_to(root)), "prompt_token_ids": ids})
    if len(found) < count:
        raise typer.BadParameter(f"only {len(found)} files have {2 * length} tokens, {count} were asked for")
    return [found[index * len(found) // count] for index in range(count)]


def main(
    output: Annotated[Path, typer.Argument(help="JSON lines to write.")],
    count: Annotated[int, typer.Option(help="Texts.")] = 20,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = 192,
    training: Annotated[bool, typer.Option("--training", help="Use files that training saw.")] = False,
) -> None:
    """Write the texts."""
    output.write_text("".join(json.dumps(text) + "\n" for text in chosen(training, count, length)))


if __name__ == "__main__":
    typer.run(main)
