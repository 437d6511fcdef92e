"""The five papers' recipes beside each other at equal memory, on the carved model's routing. SIMULATED; not timed.

    python benchmarks/papers/five_papers.py

The serving code runs on a virtual clock (``vllm_spac/tools/traces``), with recorded routing of the carved model,
experts of Qwen3-30B-A3B in bf16, and the costs of a profile, in proportion to the model's layers.
Reads ahead are limited as in serving (``extra``).
Each recipe is a preset as far as a replay knows it:

- MoE-SpAc: the preset, with 8 drafts of the dense parent per step.
- SP-MoE: the preset, with 4 drafts of the parent. Each forward of it names as much of what the routers will choose as
  the real predictor does (``real_sp_moe.json``), and reads begin then.
- Speculating Experts: the preset; an oracle of the next layer that is right as often as ``quasi_hidden`` is
  (``real_predictors.json``).
- OD-MoE: on one machine, a shadow that knows a step as well as an INT8 copy (``real_shadow.json``), slots that are
  given up after use; the shadow's own time and memory are not counted. Its workers are calculated besides.
- SP-MoE's reserve is of each layer, as ``layer_lru`` is; the preset's one LRU of all layers is beside it.
- MoE-Spec: drafts of the EAGLE-3 head, each layer's rows cut to a budget by how many rows selected an expert, and their
  other experts replaced by the best of the shortlist. A chain, because no trace has trees. LOSSY.

A draft costs what ``drafters`` says, of a head or of a parent. ``drafts_account.py`` has more drafters, by their
strength, where the device decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, TRACES, PlanError, Script, progress, show, write_result
from benchmarks.pages import result
from benchmarks.papers import recorded
from benchmarks.papers.drafters import HEAD, PARENT, Drafter
from benchmarks.papers.simulated_workers import LayerTimes, Network, cacheless
from benchmarks.scaled.proportions import EXPERT_PARAMETERS, LAYERS
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.recording.trace_file import ROW_KINDS, Trace
from vllm_spac.tools.traces.replayed import Outcome, filling, rows_of_records
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy, simulate

EXPERT_BYTES = 2 * EXPERT_PARAMETERS
BUDGETS = (24, 16)
NETWORK = Network(latency=45e-6, bandwidth=1.17e9)  # 10 Gbit/s, with its software: assumed
app = Script(__doc__)


@dataclass(frozen=True)
class Recipe:
    """A row: whose it is, the trace that it replays, and its knobs; ``names``: recall of a draft model's names."""

    paper: str
    trace: str
    policy: str
    balancer: str = "none"
    prefetch: str = "off"
    names: float | None = None
    budget: int = 0

    def costs(self, known: Costs, layers: int) -> Costs:
        """Returns the costs of a model of ``layers`` layers with this recipe's drafter, in proportion."""
        drafter = Drafter("", *(HEAD if self.trace.startswith("eagle") else PARENT))
        part = layers / LAYERS
        return known.model_copy(update={"other": known.other * part, "draft": drafter.seconds(known) * part})


def recipes() -> dict[str, Recipe]:
    known = {paper: PRESETS[paper].knobs for paper in PRESETS}
    spac = known["moe-spac"]
    recall = result("real_predictors")["models"]["real"]["quasi_hidden"]["recall_at_k"]
    gate = result("real_sp_moe")["texts"]["by_input"]["served"]["recall"]["8"]
    shadow = shadow_recall()
    ahead = f"oracle@reach=1@recall={recall:.3f}@extra={EXTRA}"
    found = {
        "LRU": Recipe("", "none1", "layer_lru"),
        "LRU, CPU experts": Recipe("", "none1", "layer_lru", "waterfill"),
        "LRU, drafts": Recipe("", "draft4_1", "layer_lru"),
        "MoE-SpAc": Recipe(
            "moe-spac", "draft8_1", spac["policy"], spac["cpu_experts"], f"{spac['prefetch']}@extra={EXTRA}"
        ),
        "SP-MoE's drafts, on demand": Recipe("", "draft4_1", known["sp-moe"]["policy"]),
        "SP-MoE": Recipe("sp-moe", "draft4_1", known["sp-moe"]["policy"], prefetch="draft_gate", names=gate),
        "SP-MoE, an LRU per layer": Recipe("sp-moe", "draft4_1", "layer_lru", prefetch="draft_gate", names=gate),
        "Speculating Experts": Recipe("speculating-experts", "none1", "reuse", prefetch=ahead),
        "OD-MoE, one machine": Recipe(
            "od-moe", "none1", known["od-moe"]["policy"], prefetch=f"oracle@recall={shadow:.4f}@extra={EXTRA}"
        ),
        "MoE-Spec's drafts, exact": Recipe("moe-spec", "eagle4_1", "reuse"),
    }
    found |= {f"MoE-Spec, B = {count}": Recipe("moe-spec", "eagle4_1", "reuse", budget=count) for count in BUDGETS}
    return found | {
        "ours: reuse": Recipe("", "none1", "reuse"),
        "ours: reuse, CPU experts": Recipe("", "none1", "reuse", "waterfill"),
        "ours: reuse, CPU experts, one layer ahead": Recipe("", "none1", "reuse", "waterfill", ahead),
        "ours: reuse, CPU experts, 4 drafts": Recipe("", "draft4_1", "reuse", "waterfill"),
        "ours: reuse, CPU experts, head": Recipe("", "eagle4_1", "reuse", "waterfill"),
        "ours: reuse, CPU experts, head, B = 16": Recipe("", "eagle4_1", "reuse", "waterfill", budget=16),
    }


def budgeted(trace: Trace, budget: int) -> Trace:
    """The trace as a budget of ``budget`` experts would have had it, prompts excepted (``selected``, substitution)."""
    ids, decoding = trace.ids.copy(), trace.counted()
    for first, last in zip(trace.record_start[:-1], trace.record_start[1:], strict=True):
        rows = np.arange(first, last)[decoding[first:last]]
        counts = np.bincount(ids[rows].ravel(), minlength=trace.facts.experts)
        if np.count_nonzero(counts) <= budget:
            continue
        order = np.argsort(-counts, kind="stable")[:budget]
        for row in rows:
            kept = [each for each in ids[row] if each in order]
            ids[row] = kept + [each for each in order if each not in kept][: len(ids[row]) - len(kept)]
    return replace(trace, ids=ids)


def named(trace: Trace, recall: float) -> list[np.ndarray | None]:
    """What a draft model's forwards name of each step with drafts, int16 [rows, L, k]: ``recall`` of it is right.

    The last draft is not read, and nothing is named of it.
    """
    facts, random = trace.facts, np.random.default_rng(0)
    ends = np.searchsorted(trace.record_step, np.arange(trace.steps + 1))
    drafts, prompt = ROW_KINDS.index("draft"), ROW_KINDS.index("prefill")
    found: list[np.ndarray | None] = []
    for step in range(trace.steps):
        kinds = trace.row_kind[trace.row_start[step] : trace.row_start[step + 1]]
        if not (kinds == drafts).any() or (kinds == prompt).any() or ends[step + 1] - ends[step] < facts.layers:
            found.append(None)
            continue
        first = trace.record_start[ends[step]]
        ids = trace.ids[first : first + facts.layers * len(kinds)].reshape(facts.layers, len(kinds), -1)
        ids = ids.transpose(1, 0, 2).astype(np.int16)
        wrong = random.integers(0, facts.experts, ids.shape, dtype=np.int16)
        ids = np.where(random.random(ids.shape) < recall, ids, wrong)
        ids[-1] = -1
        found.append(ids)
    return found


class Drafted(SlotsReplay):
    """A replay in whose draft phases each forward of the draft model names experts; ``named``: as ``named`` returns."""

    named: list[np.ndarray | None]

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        names, self._now = self.named[step], None
        if names is not None and not self.has_prompts(step) and drafting:
            ids = torch.from_numpy(names.astype(np.int64))
            read = int((ids[:, 0, 0] >= 0).sum())
            for row in range(read):
                self.link.run(drafting / read)
                self.layers.loader.prefetcher.draft(PredictorInputs(START, draft_ids=ids[: row + 1].clone()))
            self._now, drafting = ids, 0.0
        super().begin_step(step, drafting, layers)

    def _inputs(self) -> PredictorInputs | None:
        return None if self._now is None else PredictorInputs(START, draft_ids=self._now)


def replay_drafted(recipe: Recipe, trace: Trace, costs: Costs, share: float) -> Outcome:
    """Replays a recipe whose draft model names experts."""
    assert recipe.names is not None
    slots = math.ceil(share * trace.facts.total)
    outcome = Outcome(recipe.policy, "none", slots, share, prefetch=recipe.prefetch)
    policy = build_policy(recipe.policy, trace, slots, prefetch=recipe.prefetch)
    replay = Drafted(trace, costs, EXPERT_BYTES, outcome, policy, None, PrefetchSettings.of(recipe.prefetch))
    replay.named = named(trace, recipe.names)
    replay.fill(filling(trace, slots))
    return replay.run(rows_of_records(trace))


def run(recipe: Recipe, trace: Trace, costs: Costs, share: float) -> Outcome:
    if recipe.names is not None:
        return replay_drafted(recipe, trace, costs, share)
    slots = round(share * trace.facts.total)
    return simulate(
        budgeted(trace, recipe.budget) if recipe.budget else trace,
        slots,
        costs,
        policy=recipe.policy,
        balancer=recipe.balancer,
        prefetch=recipe.prefetch,
        expert_bytes=EXPERT_BYTES,
    )


def facts(name: str, recipe: Recipe, share: float, found: Outcome, tokens: int) -> dict[str, Any]:
    return {
        "recipe": name,
        "paper": recipe.paper,
        "lossy": bool(recipe.budget),
        "drafts": recipe.trace,
        "share": share,
        "tokens_per_second": tokens / found.seconds,
        "hit_rate": found.hit_rate,
        "cpu_share": found.cpu / max(1, found.hits + found.misses + found.cpu),
        "read_per_token": (found.loads + found.prefetches) / tokens,
    }


@app.main
def main(
    machine: Annotated[str, typer.Option(help="Profile of the machine.")] = "rtx4090",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "25,50",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_five_papers.json",
) -> None:
    chosen = recipes()
    wanted = {recipe.trace for recipe in chosen.values()}
    loaded = {name: one for name, one in recorded.load([TRACES / "real"]).items() if name in wanted}
    if missing := ", ".join(sorted(wanted - loaded.keys())):
        raise PlanError(
            f"{TRACES / 'real'} has no trace {missing}; record it: benchmarks/replay/record.py --case {missing}"
        )
    known, layers = recorded.known(loaded), loaded["none1"].trace.facts.layers
    profile, rows = Costs.read(machine), []
    sizes = [float(each) / 100 for each in shares.split(",")]
    with progress() as bar:
        task = bar.add_task("", total=len(sizes) * len(chosen))
        for share in sizes:
            base = 0.0  # tokens/s of the first recipe
            for name, recipe in chosen.items():
                bar.update(task, description=f"{share:.0%}: {name}")
                trace = loaded[recipe.trace].trace
                found = run(recipe, trace, recipe.costs(profile, layers), share)
                row = facts(name, recipe, share, found, int(trace.step_tokens.sum()))
                base = base or row["tokens_per_second"]
                rows.append(row | {"gain": row["tokens_per_second"] / base})
                bar.advance(task)
    costs = chosen["LRU"].costs(profile, layers)
    times = LayerTimes.of(costs, loaded["none1"].trace.facts, EXPERT_BYTES)
    workers = {
        str(count): cacheless(layers, 8, count // 2, NETWORK, times, 2 * 2048, shadow_recall(), fan=2)
        for count in (2, 4, 8, 16)
    }
    how = {"how": "simulated", "profile": costs.model_dump(mode="json"), "expert_bytes": EXPERT_BYTES}
    write_result(output, recorded.nan_to_none(known | how | {"rows": rows, "workers": workers}))
    show(f"{machine}, simulated", rows, "recipe", "share", "tokens_per_second", "gain", "hit_rate", "read_per_token")


def shadow_recall() -> float:
    return float(result("real_shadow")["shadows"]["int8"]["1, 1"]["recall"])


if __name__ == "__main__":
    app()
