"""Counts what steps of few prompt rows read of experts without a slot: which of them, and how often each.

With ``plane=pointers`` such a step reads them in place, once for every 64 of an expert's rows. Steps are windows of the
text of a trace; the experts that it selects most often have the slots, of all layers together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common import RESULTS, Script, provenance, sha256, show, write_result
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.trace_text import Text

BLOCK = 64  # rows of an expert that a kernel's tile has from 33 rows on; 128 with 16 bits and more than 256 rows
EACH = (4, 8, 12, MANY_ROWS - 0.125, 32, 64, 112)  # rows of a step for each expert of a layer

app = Script(__doc__)


@app.main
def main(
    trace: Annotated[Path, typer.Argument(help="A trace of one request at a time.", exists=True)],
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10 25 50",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_prompt_reads.json",
) -> None:
    text = Text.of(Trace.load(trace))
    rows = [found for share in shares.split() for each in EACH if (found := reads(text, float(share), each))]
    facts = {"trace": {"file": trace.name, "sha256": sha256(trace)}, "tokens": len(text), "experts": text.experts}
    write_result(output, {"provenance": provenance()} | facts | {"many_rows": MANY_ROWS, "rows": rows})
    show("experts without a slot", rows, "percent", "step_rows", "selected", "reads_of_each")


def reads(text: Text, percent: float, each: float) -> dict | None:
    """Returns the means over windows and layers; None where the text is shorter than a window.

    Args:
        percent: of the experts that have slots.
        each: rows of a step for each expert of a layer.
    """
    rows, shape = int(each * text.experts / text.top_k), (text.layers, text.experts)
    windows = len(text) // rows
    if not windows:
        return None
    counts = np.zeros((windows, *shape), dtype=np.int64)
    ids = text.ids[: windows * rows].astype(np.int64)
    window, layer = np.arange(windows * rows) // rows, np.arange(text.layers)
    np.add.at(counts, (window[:, None, None], layer[None, :, None], ids), 1)
    missing = np.ones(shape, dtype=bool)
    missing.ravel()[np.argsort(-counts.sum(0).ravel(), kind="stable")[: int(percent / 100 * missing.size)]] = False
    mine = counts[:, missing]
    selected, blocks = np.count_nonzero(mine), int((-(-mine // BLOCK)).sum())
    return {
        "percent": percent,
        "each": each,
        "step_rows": rows,
        "windows": windows,
        "selected": round(selected / mine.size, 4),
        "reads_of_each": round(blocks / selected, 4),
    }


if __name__ == "__main__":
    app()
