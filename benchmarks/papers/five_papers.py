"""The five papers' recipes beside each other at equal memory, on the carved model's routing. SIMULATED; not timed.

    python benchmarks/papers/five_papers.py

The serving code runs on a virtual clock (``vllm_spac/tools/traces``), with recorded routing of the carved model,
experts of Qwen3-30B-A3B in bf16, and the costs of a profile, in proportion to the model's layers.
Reads ahead are limited as in serving (``extra``).
Each recipe is a preset as far as a replay knows it:

- MoE-SpAc: the preset, with 8 drafts of the dense parent per step.
- SP-MoE: the preset, with 4 drafts of the parent. Each forward of it names as much of what the routers will choose as
  the real predictor does (``real_sp_moe.json``), and reads begin then.
- Speculating Experts: the preset, which executes what it names one layer ahead from the slots of two buffers (LOSSY):
  each expert of a decoding row is the routers' as often as ``quasi_hidden`` is right (``real_predictors.json``), else
  another. Beside it the same names are read ahead only, over a cache of the share.
- OD-MoE: on one machine, a shadow that knows a step as well as an INT8 copy (``real_shadow.json``), slots that are
  given up after use; the shadow's own time and memory are not counted. Its workers are calculated besides.
- SP-MoE's reserve is of each layer, as the preset's ``layer_lru`` is; one LRU of all layers is beside it.
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
from benchmarks.papers.drafters import HEAD, PARENT
from benchmarks.papers.simulated_workers import LayerTimes, Network, cacheless
from benchmarks.scaled.proportions import EXPERT_PARAMETERS, LAYERS
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.recording.trace_file import ROW_KINDS, Trace
from vllm_spac.tools.traces.replayed import Outcome, filling, rows_of_records
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy, simulate
from vllm_spac.tools.traces.trace_statistics import draft_depths

EXPERT_BYTES = 2 * EXPERT_PARAMETERS
BUDGETS = (24, 16)
NETWORK = Network(latency=45e-6, bandwidth=1.17e9)  # 10 Gbit/s, with its software: assumed
app = Script(__doc__)


@dataclass(frozen=True)
class Recipe:
    """A row: whose it is, the trace that it replays, and its knobs.

    Attributes:
        paper: the preset; empty: none's.
        names: recall of a draft model's names.
        executed: recall of the names that run in place of the routers' choice; None: the choice runs.
        buffers: slots of all layers together, in top-ks, in place of the share; 0: the share.
    """

    paper: str
    trace: str
    policy: str
    balancer: str = "none"
    prefetch: str = "off"
    names: float | None = None
    budget: int = 0
    executed: float | None = None
    buffers: int = 0

    @property
    def lossy(self) -> bool:
        return bool(self.budget) or self.executed is not None

    def costs(self, known: Costs, layers: int) -> Costs:
        """Returns the costs of a model of ``layers`` layers with this recipe's drafter, in proportion."""
        drafter, part = HEAD if self.trace.startswith("eagle") else PARENT, layers / LAYERS
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
        "SP-MoE": Recipe("sp-moe", "draft4_1", known["sp-moe"]["policy"], prefetch="draft_gate", names=gate),
        "SP-MoE, one LRU of all layers": Recipe("", "draft4_1", "lru", prefetch="draft_gate", names=gate),
        "two buffers, on demand": Recipe("", "none1", known["speculating-experts"]["policy"], buffers=2),
        "Speculating Experts, two buffers": Recipe(
            "speculating-experts",
            "none1",
            known["speculating-experts"]["policy"],
            prefetch=f"oracle@reach=1@extra={EXTRA}",
            executed=recall,
            buffers=2,
        ),
        "the same names, read ahead": Recipe("", "none1", "reuse", prefetch=ahead),
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
        "ours: reuse, CPU experts, head": Recipe("composed", "eagle4_1", "reuse", "waterfill"),
        "ours: reuse, CPU experts, head, B = 16": Recipe("composed-lossy", "eagle4_1", "reuse", "waterfill", budget=16),
    }


def cut(ids: np.ndarray, experts: int, budget: int) -> np.ndarray:
    """What a layer's rows run that selected ``ids``, [rows, top_k], under a budget (``selected``, substitution)."""
    counts = np.bincount(ids.ravel(), minlength=experts)
    if np.count_nonzero(counts) <= budget:
        return ids
    order = np.argsort(-counts, kind="stable")[:budget]
    found = []
    for row in ids:
        kept = [each for each in row if each in order]
        found.append(kept + [each for each in order if each not in kept][: len(row) - len(kept)])
    return np.array(found, dtype=ids.dtype)


def budgeted(trace: Trace, budget: int) -> Trace:
    """The trace as a budget of ``budget`` experts would have had it, prompts excepted."""
    ids, decoding = trace.ids.copy(), trace.counted()
    for first, last in zip(trace.record_start[:-1], trace.record_start[1:], strict=True):
        rows = np.arange(first, last)[decoding[first:last]]
        ids[rows] = cut(ids[rows], trace.facts.experts, budget)
    return replace(trace, ids=ids)


def executed(trace: Trace, recall: float) -> Trace:
    """The trace if decoding rows ran what a predictor names one layer ahead, of which ``recall`` is right."""
    random, ids, decoding = np.random.default_rng(0), trace.ids.copy(), trace.counted()
    for record, (first, last) in enumerate(zip(trace.record_start[:-1], trace.record_start[1:], strict=True)):
        if not trace.record_layer[record]:
            continue
        for row in np.arange(first, last)[decoding[first:last]]:
            wrong = random.random(len(ids[row])) >= recall
            others = np.setdiff1d(np.arange(trace.facts.experts), ids[row])
            ids[row][wrong] = random.choice(others, wrong.sum(), replace=False)
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
    slots = recipe.buffers * trace.facts.top_k or round(share * trace.facts.total)
    if recipe.budget:
        trace = budgeted(trace, recipe.budget)
    if recipe.executed is not None:
        trace = executed(trace, recipe.executed)
    return simulate(
        trace,
        slots,
        costs,
        policy=recipe.policy,
        balancer=recipe.balancer,
        prefetch=recipe.prefetch,
        expert_bytes=EXPERT_BYTES,
    )


def thresholds(trace: Trace) -> dict[str, dict[str, float]]:
    """What MoE-SpAc's thresholds divide (its figure 9a), by tau: means over layers and forwards.

    ``cpu`` is r_c, the share of the selections whose expert scores less, ``gpu`` r_g, the share of the distinct
    selected experts that do not; each with the standard deviation within a layer.
    """
    pairs, estimator = [], UtilityEstimator(trace.facts.total, gamma=int(draft_depths(trace).max()))
    for counts in trace.step_counts():
        if counts is None:
            continue
        rows, scores = (each.reshape(trace.facts.layers, -1) for each in (counts.clip(0), estimator.scores))
        cold = scores[None] < np.arange(1, estimator.upper + 1)[:, None, None]
        cpu, gpu = (rows * cold).sum(2) / rows.sum(1), ((rows > 0) & ~cold).sum(2) / (rows > 0).sum(1)
        pairs.append((cpu, gpu))
        estimator.observe_step(counts)
    every = np.array(pairs)  # [steps, 2, K, layers]
    mean, spread = every.mean(axis=(0, 3)), every.std(axis=0).mean(axis=2)
    found = {"cpu": mean[0], "gpu": mean[1], "cpu_spread": spread[0], "gpu_spread": spread[1]}
    return {str(tau + 1): {name: float(values[tau]) for name, values in found.items()} for tau in range(len(mean[0]))}


def facts(name: str, recipe: Recipe, share: float, found: Outcome, tokens: int) -> dict[str, Any]:
    return {
        "recipe": name,
        "paper": recipe.paper,
        "lossy": recipe.lossy,
        "drafts": recipe.trace,
        "share": share,
        "tokens_per_second": tokens / found.seconds,
        "hit_rate": found.hit_rate,
        "cpu_share": found.cpu / max(1, found.hits + found.misses + found.cpu),
        "read_per_token": (found.loads + found.prefetches) / tokens,
        "waiting": found.stall_seconds / found.seconds,
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
    drafted = {  # forwards of a drafter, one after another
        name: np.maximum.reduceat(draft_depths(one.trace), one.trace.row_start[:-1]).sum()
        for name, one in loaded.items()
    }
    with progress() as bar:
        task = bar.add_task("", total=len(sizes) * len(chosen))
        for share in sizes:
            base = 0.0  # tokens/s of the first recipe
            for name, recipe in chosen.items():
                bar.update(task, description=f"{share:.0%}: {name}")
                trace = loaded[recipe.trace].trace
                costs = recipe.costs(profile, layers)
                found = run(recipe, trace, costs, share)
                row = facts(name, recipe, share, found, int(trace.step_tokens.sum()))
                row["drafting"] = float(drafted[recipe.trace] * costs.draft / found.seconds)
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
    parts = {"rows": rows, "workers": workers, "thresholds": thresholds(loaded[chosen["MoE-SpAc"].trace].trace)}
    write_result(output, recorded.nan_to_none(known | how | parts))
    show(f"{machine}, simulated", rows, "recipe", "share", "tokens_per_second", "gain", "hit_rate", "read_per_token")


def shadow_recall() -> float:
    return float(result("real_shadow")["shadows"]["int8"]["1, 1"]["recall"])


if __name__ == "__main__":
    app()
