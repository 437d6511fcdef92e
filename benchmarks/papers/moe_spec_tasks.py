"""What a budget costs tasks with right answers, in steps as serving has them, on the carved model. Nothing is timed.

    python benchmarks/papers/moe_spec_tasks.py

Held-out texts are read in steps of as many rows as a chain of 4 drafts has, and a tree of 16. Each step's rows share
a budget, all with the same vote. A context is not budgeted.

- words: guessed whole behind the text so far (cloze).
- choices: which of four continuations of a context is the likeliest.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.common import RESULTS, Script, provenance, show, write_result
from benchmarks.papers.moe_spec_resident import (
    CHOICE,
    CONTEXT,
    EXACT,
    MODELS,
    Arm,
    Reader,
    Target,
    branches,
    change,
    read_texts,
    windows,
)

STEPS = {"chain of 4": 5, "tree of 16": 17}  # rows
BUDGETS = 32, 24, 16
app = Script(__doc__)


def choices(target: Target, texts: list[Tensor], arms: list[Arm]) -> dict[Arm, list[bool]]:
    """Whether the continuation that follows is the likeliest of four from the same text, for each of ``texts``."""
    model, right = target.model, defaultdict[Arm, list[bool]](list)
    for ids in texts:
        context, places = ids[:CONTEXT], torch.arange(CONTEXT - 1)
        reader = Reader(model, target.ffn)
        reader.read(context[:-1])
        for arm in arms:
            likely = []
            for branch in branches(ids):
                target.arm = arm
                logits = model.logits(reader.read(torch.cat([context[-1:], branch[:-1]]))[0]).log_softmax(-1)
                target.arm = None
                reader.keep(places)
                likely.append(float(logits.gather(1, branch[:, None]).sum()))
            right[arm].append(max(range(4), key=likely.__getitem__) == 0)
    return right


@app.main
def main(
    texts: Annotated[int, typer.Option(min=1, help="Texts of each kind, of 256 tokens.")] = 6,
    tasks: Annotated[int, typer.Option(min=2, help="Choices of each kind.")] = 50,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_moe_spec_tasks.json",
) -> None:
    origin, target = provenance(), Target()
    tokenizer = Tokenizer.from_file(str(MODELS / "dense" / "tokenizer.json"))
    arms = [Arm("selected", budget) for budget in BUDGETS]
    read, four = windows("held", texts, 256), windows("held", tasks, 4 * CONTEXT + CHOICE)
    asked = [ids for each in four.values() for ids in each]
    result: dict[str, Any] = {
        "provenance": origin,
        "toy_model": False,
        "choice": CHOICE,
        "tasks": len(asked),
        "rows": [],
    }
    with torch.inference_mode():
        for steps, rows in STEPS.items():
            target.rows = rows
            found = read_texts(target, read, arms, tokenizer)
            right = choices(target, asked, [EXACT, *arms])
            for row, arm in zip(found, (EXACT, *arms), strict=True):
                of_four = {f"four_{name}": value for name, value in change(right[arm], right[EXACT]).items()}
                result["rows"].append({"steps": steps, "rows": rows, **row, **of_four})
            write_result(output, result)
    names = "steps", "budget", "distinct", "ppl_ratio", "right", "change", "change_error"
    show("budgets in tasks", result["rows"], *names, "four_right", "four_change", "four_change_error")


if __name__ == "__main__":
    app()
