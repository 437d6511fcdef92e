"""MoE-Spec's figures 2b and 2c and its Eq. 9, from recorded routing.

2b: distinct experts per layer by the rows of a step. 2c: share of the routing mass that the best B experts hold. The
rows are consecutive tokens of a text (``trace_text.py``), the paper's are those of a draft tree. The paper's
mass is that of the routers' scores over all experts; a trace has the selected experts only, hence the mass is that of
their routing weights where all traces have them, and the number of selections otherwise. Eq. 9: how often the pair of
experts that is selected together most is selected, over what pairs of uniformly random selections would have; the
greatest of many pairs, so short traces overestimate it. arXiv:2602.16052; OLMoE there: 10 to 33 by layer, mean 23.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common import RESULTS, Script, write_result
from benchmarks.papers import spread
from vllm_spac.tools.traces.trace_text import Text

SIZES = (1, 3, 5, 9, 17, 33, 63, 127)
CURVES = (9, 63)  # rows of 2c
app = Script(__doc__)


@app.main
def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces or folders of them.", show_default="benchmarks/traces")
    ] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_moe_spec.json",
) -> None:
    loaded = spread.load(traces)
    texts = {name: Text.of(one.trace) for name, one in loaded.items()}
    texts = {name: text for name, text in texts.items() if len(text.windows(SIZES[-1]))}
    if not texts:
        raise typer.BadParameter(f"no trace has {SIZES[-1]} consecutive rows of a text; record one request at a time")
    weighted = all(text.weights is not None for text in texts.values())
    found = {name: figures(text, weighted) for name, text in texts.items()}
    result = spread.result(loaded, found) | {"sizes": SIZES, "mass": "routing weights" if weighted else "selections"}
    result["tokens"] = {name: len(text) for name, text in texts.items()}
    write_result(output, result)


def figures(text: Text, weighted: bool) -> dict[str, list[float]]:
    """Returns the curves of one trace: ``distinct`` by SIZES, ``mass_R`` by budget for R rows, ``pairs`` by layer."""
    distinct = [float((mass(text, rows, weighted=False) > 0).sum(axis=2).mean()) for rows in SIZES]
    curves = {f"mass_{rows}": held(mass(text, rows, weighted=weighted)) for rows in CURVES}
    return {"distinct": distinct, **curves, "pairs": concentration(text).tolist()}


def mass(text: Text, rows: int, *, weighted: bool) -> np.ndarray:
    """Returns float64 [windows, layers, experts]: sums over windows of ``rows`` tokens, of weights or of ones."""
    first = text.windows(rows)
    ids = text.ids[first[:, None] + np.arange(rows)]
    size = text.layers * text.experts
    base = np.arange(len(first))[:, None, None, None] * size + np.arange(text.layers)[:, None] * text.experts
    given = text.weights[first[:, None] + np.arange(rows)].ravel() if weighted and text.weights is not None else None
    flat = np.bincount((ids + base).ravel(), given, minlength=len(first) * size)
    return flat.reshape(len(first), text.layers, text.experts)


def held(found: np.ndarray) -> list[float]:
    """Returns the share of the mass that the best 1 .. N experts hold, mean over windows and layers."""
    ordered = np.cumsum(-np.sort(-found, axis=2), axis=2)
    return (ordered / ordered[:, :, -1:]).mean(axis=(0, 1)).tolist()


def concentration(text: Text) -> np.ndarray:
    """Returns float64 [layers], Eq. 9."""
    experts, top_k = text.experts, text.top_k
    expected = len(text) * top_k * (top_k - 1) / (experts * (experts - 1))
    most = np.zeros(text.layers)
    for layer in range(text.layers):
        chosen = np.zeros((len(text), experts), dtype=np.float32)
        np.put_along_axis(chosen, text.ids[:, layer].astype(np.int64), 1, axis=1)
        together = chosen.T @ chosen
        np.fill_diagonal(together, 0)
        most[layer] = together.max()
    return most / expected


if __name__ == "__main__":
    app()
