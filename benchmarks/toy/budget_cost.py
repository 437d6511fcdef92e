"""Measures the cost of choosing shortlists: microseconds per layer, and its share of the toy model's verify step.

    python benchmarks/toy/budget_cost.py            # a second: layers alone, one thread
    python benchmarks/toy/budget_cost.py --engine   # minutes: a real engine, all experts resident, EAGLE-3 drafts
    python benchmarks/toy/budget_cost.py --engine --model .cache/toy/mid --slots 25%   # with experts that miss

In the engine every prompt runs under each setting in turn, ``never binds`` among them: a mass that ranks all experts
and cuts none. ``share`` is the time that layers spent in the budget over the seconds of the same steps, so that
neither acceptance length nor drift of the machine affects it. All numbers are of the toy model and this machine.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, provenance, write_result
from texts import chosen

from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.methods.moe_spec.control import BudgetControl, BudgetedLayer
from vllm_spac.methods.moe_spec.settings import BudgetSettings, RoutingRule

MODELS = Path(__file__).parent / "models"
EXPERTS, TOP_K, LAYERS, DRAFTS = 64, 8, 6, 8
_PROMPT = 32  # tokens
SETTINGS: dict[str, dict] = {
    "B = 32": {"budget": 32},
    "B = 16": {"budget": 16},
    "B = 32, truncation": {"budget": 32, "coverage": "truncation"},
    "0.98 of selected": {"mass": 0.98},
    "0.98 of scores": {"mass": 0.98, "mass_of": "scores"},
    "all experts": {"budget": EXPERTS},
}
ENGINE_SETTINGS = {
    "no budget": {},
    "never binds": {"mass": 1 - 1e-12, "mass_of": "scores"},
    "B = 32": {"budget": 32},
    "0.98 of selected": {"mass": 0.98},
}


def layers_alone(rows: int, settings: dict, times: int = 300) -> dict:
    """Measures CPU microseconds per layer: tenth percentile and median over forwards of all layers."""
    layers = [BudgetedLayer(f"layer.{i}", EXPERTS, TOP_K, RoutingRule()) for i in range(LAYERS)]
    control = BudgetControl(layers)
    control.change(BudgetSettings(**settings))
    generator = torch.Generator().manual_seed(0)
    popular = 0.5 * torch.randn(EXPERTS, generator=generator)
    routed = []
    for _ in range(50):
        logits = torch.randn(rows, EXPERTS, generator=generator) + popular
        weights, ids = logits.softmax(-1).topk(TOP_K)
        routed.append((logits, weights / weights.sum(1, keepdim=True), ids.int()))
    found = []
    for time_ in range(times):
        step = Step((RequestRows(0, rows, RowKind.VERIFY, rows - 1),))
        start = time.thread_time()
        for layer in range(LAYERS):
            control.apply(layer, *routed[(time_ * LAYERS + layer) % len(routed)], step)
        found.append((time.thread_time() - start) / LAYERS * 1e6)
    found = sorted(found[times // 10 :])
    return {"p10": found[len(found) // 10], "median": statistics.median(found)}


@contextmanager
def timed(runtime):
    """Yields a dict that accumulates the seconds of verify steps and of the budget in them."""
    found = {"steps": 0, "seconds": 0.0, "budget_seconds": 0.0}
    apply, begin, end = runtime.budget.apply, runtime.begin_step, runtime.end_step
    running = {"began": None, "budget": 0.0}

    def applied(*args, **kwargs):
        start = time.perf_counter()
        try:
            return apply(*args, **kwargs)
        finally:
            running["budget"] += time.perf_counter() - start

    def begun(step):
        verifies = all(request.kind == RowKind.VERIFY for request in step.requests)
        running.update(began=time.perf_counter() if verifies else None, budget=0.0)
        return begin(step)

    def ended(*emitted):
        if running["began"] is not None:
            found["steps"] += 1
            found["seconds"] += time.perf_counter() - running["began"]
            found["budget_seconds"] += running["budget"]
        return end(*emitted)

    runtime.budget.apply, runtime.begin_step, runtime.end_step = applied, begun, ended
    try:
        yield found
    finally:
        del runtime.budget.apply, runtime.begin_step, runtime.end_step


def in_an_engine(model: Path, slots: str, prompts: int, new_tokens: int) -> list[dict]:
    """Measures the milliseconds of a verify step from its inputs to its tokens, and the budget's share of them."""
    from vllm_spac.tools.evaluation import engine as offline

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    pieces = [text["prompt_token_ids"] for text in chosen(False, prompts, _PROMPT)]
    head = MODELS / "eagle3" if model == MODELS / "target" else model.with_name(f"{model.name}-eagle3")
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    spac = {"slots": slots, "guard": "off"}
    found: dict[str, list[dict]] = {name: [] for name in ENGINE_SETTINGS}
    length = _PROMPT + new_tokens + 2 * DRAFTS
    with offline.engine(str(model), spac, length, False, speculative_config=drafts) as llm:
        (runtime,) = llm.collective_rpc(lambda worker: worker._spac_experts().runtime)
        offline.generate(llm, pieces[:1], new_tokens)  # warm
        for piece in pieces:
            for name, settings in ENGINE_SETTINGS.items():
                llm.collective_rpc("spac_budget", args=(settings,))
                with timed(runtime) as measured:
                    offline.generate(llm, [piece], new_tokens)
                found[name].append(measured)
    return [
        {
            "setting": name,
            "steps": sum(run["steps"] for run in runs),
            "milliseconds_a_step": statistics.median(1e3 * run["seconds"] / run["steps"] for run in runs),
            "microseconds_a_layer": 1e6
            * sum(r["budget_seconds"] for r in runs)
            / sum(r["steps"] for r in runs)
            / LAYERS,
            "share": sum(run["budget_seconds"] for run in runs) / sum(run["seconds"] for run in runs),
        }
        for name, runs in found.items()
    ]


def main(
    engine: Annotated[bool, typer.Option("--engine", help="Measure the share of a step in a real engine.")] = False,
    model: Annotated[Path, typer.Option(help="Of --engine; its EAGLE-3 head is beside it.")] = MODELS / "target",
    slots: Annotated[str, typer.Option(help="Of --engine, e.g. 25%.")] = "100%",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, each under every setting.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated after each.")] = 64,
    output: Annotated[Path, typer.Option(help="JSON of --engine.")] = RESULTS / "toy_budget_cost.json",
) -> None:
    if engine:
        measured = in_an_engine(model, slots, prompts, new_tokens)
        write_result(
            output,
            {"label": "toy model", "drafts": DRAFTS, "slots": slots, "rows": measured, "provenance": provenance()},
        )
        print(json.dumps(measured, indent=1))
        return
    torch.set_num_threads(1)
    with torch.inference_mode():
        layers_alone(DRAFTS + 1, {"budget": 32}, 60)  # warm
        for name, settings in SETTINGS.items():
            for rows in (2, 5, 9):
                found = layers_alone(rows, settings)
                print(
                    f"{name:20} {rows} rows: {found['p10']:6.1f} us per layer (p10), {found['median']:6.1f} us (median)"
                )


if __name__ == "__main__":
    typer.run(main)
