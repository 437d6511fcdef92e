"""MoE-SpAc's figures 7 and 8 from recorded routing: when the reuse of experts pays for drafts, what steps foretell.

7: a / b, the experts that a step of gamma + 1 consecutive tokens selects over those of one token, beside Omega, the
tokens that such a step yields when each draft is accepted with probability alpha. A step is worth it while a / b <
Omega (Eq. 17), which neglects what drafting costs. With a cache, what counts are the loads, not the experts: the same
ratio is therefore also that of the loads with a share of the experts in slots (policy ``reuse``). ``needed`` is the
alpha at which Omega reaches the ratio; above 1, no acceptance suffices.

8: the rows that select an expert, step by step, and the correlation of these counts between one step and the next.

All rows are text, in its order: drafts that are all accepted. Rejected ones would select more experts. The paper's
figure 7 is of Qwen3-235B on MT-Bench with alpha = 0.8 (arXiv:2603.09983, appendices A.1 and B.1).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import spread
from common import RESULTS, write_result

from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import ROW_KINDS, STEP_KINDS, Trace, TraceFacts
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.trace_text import Text

DRAFTS = (0, 1, 2, 3, 4, 6, 8)  # gamma
ALPHAS = (0.6, 0.8)
SHARES = (25, 50)  # percent of the experts in slots
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__)
def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces or folders of them.", show_default="benchmarks/traces")
    ] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_reuse.json",
) -> None:
    loaded = spread.load(traces)
    texts = {name: Text.of(one.trace) for name, one in loaded.items()}
    texts = {name: text for name, text in texts.items() if len(text.windows(DRAFTS[-1] + 1)) > 1}
    if not texts:
        raise typer.BadParameter(f"no trace has {2 * (DRAFTS[-1] + 1)} consecutive rows of a text; record longer ones")
    asked = track(texts.items(), "measuring", console=Console(stderr=True), transient=True)
    found = {name: curves(text, loaded[name].trace.facts) for name, text in asked}
    result = spread.result(loaded, found) | {"drafts": DRAFTS, "shares_percent": SHARES}
    result["omega"] = {str(alpha): [round(omega(gamma, alpha), 4) for gamma in DRAFTS] for alpha in ALPHAS}
    write_result(output, spread.nan_to_none(result))


def omega(gamma: int, alpha: float) -> float:
    """Returns the expected tokens of a step with ``gamma`` drafts, each accepted with probability ``alpha``: Eq. 2."""
    return sum(alpha**drafts for drafts in range(gamma + 1))


def needed(gamma: int, ratio: float) -> float:
    """Returns the ``alpha`` at which ``omega`` is ``ratio``; nan without drafts or ratio."""
    if gamma == 0 or ratio != ratio:
        return float("nan")
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if omega(gamma, middle) < ratio else (low, middle)
    return high


def curves(text: Text, facts: TraceFacts) -> dict[str, list[float]]:
    """Returns the curves of one trace, a value for each of DRAFTS.

    ``experts``: distinct experts over those of one token; ``loads_S``: loads over those of one token, with S percent in
    slots; ``needed_...``: the acceptance that pays for either; ``correlation``: between consecutive steps' counts.
    """
    steps = [in_steps(text, facts, gamma + 1) for gamma in DRAFTS]
    found = {"experts": [float((frequencies(each) > 0).sum(axis=(1, 2)).mean()) for each in steps]}
    costs = Costs.read("rtx4090")  # loads do not depend on it
    for share in SHARES:
        slots = max(facts.top_k, round(share / 100 * facts.total))
        runs = [simulate(each, slots, costs, policy="reuse", expert_bytes=1) for each in steps]
        found[f"loads_{share}"] = [run.loads / run.steps for run in runs]
    found = {
        name: [value / values[0] if values[0] else float("nan") for value in values] for name, values in found.items()
    }
    pays = {
        f"needed_{name}": [needed(gamma, value) for gamma, value in zip(DRAFTS, values, strict=True)]
        for name, values in found.items()
    }
    return found | pays | {"correlation": [correlation(each) for each in steps]}


def in_steps(text: Text, facts: TraceFacts, rows: int) -> Trace:
    """Returns the text as the steps of a request that verify ``rows`` tokens each, all of them accepted."""
    first = text.windows(rows)
    count, kinds = len(first), [ROW_KINDS.index("verify"), *[ROW_KINDS.index("draft")] * (rows - 1)]
    ids = text.ids[first[:, None] + np.arange(rows)].transpose(0, 2, 1, 3)
    return Trace.of(
        facts,
        step_kind=np.full(count, STEP_KINDS.index("verify"), dtype=np.uint8),
        step_rows=np.full(count, rows, dtype=np.uint32),
        step_tokens=np.full(count, rows, dtype=np.uint32),
        row_kind=np.tile(np.array(kinds, dtype=np.uint8), count),
        record_step=np.repeat(np.arange(count, dtype=np.uint32), text.layers),
        record_layer=np.tile(np.arange(text.layers, dtype=np.uint16), count),
        ids=np.ascontiguousarray(ids.reshape(-1, text.top_k)),
    )


def frequencies(trace: Trace) -> np.ndarray:
    """Returns int64 [steps, layers, experts], the rows that select each expert."""
    counts = np.array([counts for counts in trace.step_counts() if counts is not None])
    return counts.reshape(len(counts), trace.facts.layers, trace.facts.experts)


def correlation(trace: Trace) -> float:
    """Returns Pearson's correlation of the experts' counts in a step with those in the next, mean over layers."""
    found = frequencies(trace).astype(np.float64)
    layers = range(found.shape[1])
    return float(np.mean([np.corrcoef(found[:-1, one].ravel(), found[1:, one].ravel())[0, 1] for one in layers]))


if __name__ == "__main__":
    app()
