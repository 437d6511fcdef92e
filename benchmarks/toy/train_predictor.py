"""Trains the predictors of a toy model or an inflated one on library files that training saw, for --spac-prefetch.

python benchmarks/toy/train_predictor.py .cache/toy/mid .cache/toy/mid.predictors.safetensors
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import predictors
import typer


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Argument(help="File to write.")],
    reach: Annotated[int, typer.Option(min=1, help="Layers that predictors look ahead.")] = 1,
    only: Annotated[str, typer.Option(help="Names, separated by commas; empty: all.")] = "linear",
) -> None:
    """Write the texts, and train on them."""
    with tempfile.TemporaryDirectory(prefix="spac-texts-") as folder:
        texts = predictors.write_texts("training", Path(folder))
        predictors.train(model, texts, output, reach, only)


if __name__ == "__main__":
    typer.run(main)
