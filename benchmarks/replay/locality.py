"""Measures the locality of recorded routing: how much a token's experts tell about those of the next tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import print

from benchmarks.common import RESULTS, ROOT, Script, is_toy, provenance, sha256, trace_files, write_result
from benchmarks.replay.routing_locality import Locality
from vllm_spac.recording.trace_file import Trace

app = Script(__doc__)


@app.main
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces, or folders of them.", show_default="benchmarks/traces"),
    ] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_locality.json",
) -> None:
    result: dict[str, Any] = {"provenance": provenance(), "traces": {}}
    for path in trace_files(traces):
        trace = Trace.load(path)
        found = Locality.of(trace)
        known = {"sha256": sha256(path), "model": trace.facts.model, "toy_model": is_toy(ROOT / trace.facts.model)}
        unions = {rows: float(values.mean()) for rows, values in found.unions.items()}
        known |= {"tokens": found.tokens, "rows": found.rows, "mean": rounded(found.means() | {"union": unions})}
        known["layers"] = rounded(found.layers() | {"union": found.unions})
        result["traces"][path.stem] = known
        print(path.name, known["mean"])
    write_result(output, result)


def rounded(value: Any) -> Any:
    """Returns numbers with six decimals, None for nan, which JSON lacks; arrays as lists."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return [rounded(item) for item in value.tolist()]
    return None if value != value else round(value, 6)


if __name__ == "__main__":
    app()
