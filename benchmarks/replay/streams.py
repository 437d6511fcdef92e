"""Calculates whether running requests should share steps, on recorded texts of the real model. Nothing is measured.

Requests decode without drafts. Either all of them share every step, or groups of them take turns of --slices steps, so
that a group's experts stay in the slots meanwhile. A step takes 1 for each layer, --row more for each further row, and
the time of an expert for each that is missing, as in drafts.py beside this file. Slots are filled by LRU in each layer.
Printed is the rate of all tokens over that of shared steps, and the longest wait between two tokens of a request.

Learned is what serves (``decisions/guard/slices``): it knows nothing in advance, and compares both on its own steps.
Texts are repeated for --steps steps, those of comparisons included.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, provenance, sha256, show, write_result
from drafts import Slots, points, texts_of

from vllm_spac.decisions.guard.slices import Slices

EXAMPLE = """[bold]Example[/]

python benchmarks/replay/streams.py .cache/real/chains.safetensors
"""
EXPERTS = 64
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


def serve(texts: list[np.ndarray], slots: int, miss: float, row: float, group: int, steps: int) -> tuple[float, float]:
    """Serves all texts, ``group`` of them in a step, for ``steps`` steps in a row.

    Args:
        texts: experts of each token of a request, uint8 [tokens, layers, top_k].

    Returns:
        Seconds per token of all requests, and the longest wait for a token; both in layers.
    """
    layers, held = texts[0].shape[1], Slots(texts[0].shape[1], slots)
    left, now, tokens, longest = [0] * len(texts), 0.0, 0, 0.0
    last = [0.0] * len(texts)
    groups = [range(first, min(first + group, len(texts))) for first in range(0, len(texts), group)]
    for turn in itertools.count():
        here = groups[turn % len(groups)]
        for _ in range(steps):
            running = [text for text in here if left[text] < len(texts[text])]
            if not running:
                break
            misses = held.take(np.stack([texts[text][left[text]] for text in running]))
            now += layers * (1 + row * (len(running) - 1)) + miss * misses
            for text in running:
                longest, last[text] = max(longest, now - last[text]), now
                left[text], tokens = left[text] + 1, tokens + 1
        if all(left[text] == len(texts[text]) for text in range(len(texts))):
            return now / tokens, longest
    raise AssertionError("texts end")


def repeat(
    texts: list[np.ndarray], slots: int, miss: float, row: float, steps: int, slices: Slices | None
) -> tuple[float, int]:
    """Serves the texts over and over; those that ``slices`` sets aside have no part in a step.

    Returns:
        Seconds per token of all requests, in layers, and how many shared most of the steps of the last quarter.
    """
    layers, held = texts[0].shape[1], Slots(texts[0].shape[1], slots)
    had, now, sizes, names = [0] * len(texts), 0.0, Counter[int](), list(map(str, range(len(texts))))
    for step in range(steps):
        aside = set() if slices is None else slices.plan(names, now)
        running = [number for number, name in enumerate(names) if name not in aside]
        misses = held.take(np.stack([texts[number][had[number] % len(texts[number])] for number in running]))
        now += layers * (1 + row * (len(running) - 1)) + miss * misses
        for number in running:
            had[number] += 1
        if slices is not None:
            slices.end_step([names[number] for number in running], len(running), now)
        sizes[len(running)] += step >= 3 * steps // 4
    return now / sum(had), sizes.most_common(1)[0][0]


@app.command(help=__doc__, epilog=EXAMPLE)
def main(
    chains: Annotated[Path, typer.Argument(help="File of fit.py chains.", exists=True, dir_okay=False)],
    machines: Annotated[str, typer.Option(help="Of scaled/run.py.")] = "rtx4090-int4,rtx4090",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10,25,50",
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "2,4,8",
    slices: Annotated[str, typer.Option(help="Steps of a turn.")] = "1,4,16,64",
    row: Annotated[float, typer.Option(min=0, help="Layers that a row takes beside the first.")] = 0.03,
    learning: Annotated[int, typer.Option("--steps", min=1, help="Of what is learned.")] = 16384,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_streams.json",
) -> None:
    said = [text.experts[:, 0] for text in texts_of(chains)["ngram"]]
    rows = []
    every = list(points(machines.split(","), [float(share) for share in shares.split(",")]))
    for (where, miss, _, share), count in track(list(itertools.product(every, map(int, streams.split(","))))):
        slots, texts = round(EXPERTS * share / 100), said[:count]
        together, wait = serve(texts, slots, miss, row, count, 1)
        alone = serve(texts[:1], slots, miss, row, 1, 1)[0]
        ways = []
        for group, steps in itertools.product((1, 2, 4), map(int, slices.split(","))):
            if group < count:
                seconds, longest = serve(texts, slots, miss, row, group, steps)
                ways.append({"group": group, "steps": steps, "gain": together / seconds, "wait": longest / wait})
        best = max(ways, key=lambda way: way["gain"])
        facts = {"machine": where, "share_percent": share, "streams": count, "together_over_one": alone / together}
        shared, _ = repeat(texts, slots, miss, row, 1024, None)
        seconds, group = repeat(texts, slots, miss, row, learning, Slices(math.inf))
        rows.append(facts | {"learned": {"gain": shared / seconds, "group": group}, "best": best, "ways": ways})
    facts = {
        "label": "calculated",
        "row": row,
        "steps": learning,
        "texts": len(said),
        "chains": chains.name,
        "sha256": sha256(chains),
    }
    write_result(output, facts | {"rows": rows, "provenance": provenance()})
    columns = ["share_percent", "streams", "together_over_one", "best.group", "best.steps", "best.gain", "best.wait"]
    columns += ["learned.group", "learned.gain"]
    show("times the tokens/s of shared steps, calculated", rows, "machine", *columns)


if __name__ == "__main__":
    app()
