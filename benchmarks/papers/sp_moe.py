"""SP-MoE on the carved model: what its predictor knows, and what reads while drafts are made give. Nothing is timed.

    python benchmarks/papers/sp_moe.py

The dense parent of the carved model is the draft model, as Mistral is of Mixtral in the paper: its MLPs were carved
into the experts, its attention and norms are the model's. Three parts:

- texts: the model and its parent read held-out texts. Of the experts that each router chose, those that the predictor
  names, by layer and by rank (figure 7b), with other inputs of the same routers besides; cosine similarity (7a); the
  experts of neighbouring tokens (2a, 2b); entropy of scores (2c).
- served: counters of engines with reads ahead and without.
- replays: the serving code on a virtual clock (vllm_spac/tools/traces), SIMULATED, with the names that an engine's
  predictor gave for the same steps: time by cutoff layer (14, 3), by slots (11), by k, by draft length (13), and hit
  rates (table 3). A draft takes what the profile says, or so long that drafting takes the paper's share of a step. Each
  forward of the draft model names what it has read when it ends, as in engines, or (by layer) each of its layers does,
  as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, ROOT, Script, provenance, show, write_result
from benchmarks.real import held
from benchmarks.serving import prompts
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.recording.trace_file import Trace
from vllm_spac.storage.checkpoint import router_weights
from vllm_spac.tools.evaluation import engine
from vllm_spac.tools.traces.replayed import Outcome, filling, rows_of_records
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy, build_prefetch

MODELS, WORK = Path(".cache") / "real", Path(".cache") / "sp_moe"  # from the checkout's root
NAMES = 16  # ranks: twice top-k
NEIGHBOURS = (1, 2, 4, 8, 16)
LENGTHS = (1, 2, 4, 6, 8)  # drafts of a step
OTHERS = (  # ways of a replay: its name, --spac-prefetch, --spac-policy
    ("off", "off", "lru"),
    ("utility", "utility", "lru"),
    ("layer ahead", "oracle@reach=1@recall=0.8", "lru"),
    ("reuse", "off", "reuse"),
    ("reuse, draft_gate", "draft_gate@k=8", "reuse"),
)
SHARE = 0.162  # of the time of a step, what the paper's drafting takes (section 2.2)
EXPERT = 16_500_000  # bytes: DeepSeek-Lite's, which has 64 experts a layer too
INPUTS = {
    "served": "what the MLP of the draft layer reads",
    "norm": "the same residual behind the norm of the model in place of the draft model's",
    "attention": "the output of the draft layer's attention alone: no residual, no norm",
    "below": "what the MLP of the draft layer below reads",
    "ahead": "the model's own: one layer ahead, in the step (the predictor gate)",
}
app = Script(__doc__)


def speculation(drafts: int) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(ROOT / MODELS / "dense"), "num_speculative_tokens": drafts}


def serving(knobs: dict[str, Any], drafts: int, length: int):
    """A ``vllm.LLM`` of the carved model and its parent; one in each process."""
    spac = {"slots": "50%", "store": "disk", "disk_dir": str(ROOT / ".cache" / "serving"), "guard": "off"} | knobs
    options = {"dtype": "float32", "speculative_config": speculation(drafts), "num_gpu_blocks_override": 512}
    return engine.engine(str(ROOT / MODELS / "target"), spac, length, tokenizer=False, **options)


# -- texts -------------------------------------------------------------------------------------------------------------


class Reading:
    """Observes the model and its draft model in this process: what each block computes, of the first forward of each.

    Attributes:
        found: (model, layer) -> ``attention``, ``hidden`` (behind the norm) and ``residual``, each [rows, d].
        ids, logits: by layer, what the model's routers chose and scored, [rows, k] and [rows, N].
    """

    def __init__(self, worker: Any) -> None:
        self.found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.ids: dict[int, torch.Tensor] = {}
        self.logits: dict[int, torch.Tensor] = {}
        runner = worker.model_runner
        worker._spac_experts().runtime.rerouter.listeners.append(self)
        for name, model in (("target", runner.get_model()), ("draft", runner.drafter.model)):
            for layer, block in enumerate(model.model.layers):
                block.self_attn.register_forward_hook(self._keeping(name, layer, "attention"))
                block.post_attention_layernorm.register_forward_hook(self._keeping(name, layer, "hidden"))

    def _keeping(self, model: str, layer: int, what: str):
        def keep(module: Any, args: Any, output: Any) -> None:
            found = self.found.setdefault((model, layer), {})
            if what not in found:
                found[what] = (output[0] if isinstance(output, tuple) else output).clone()
                if isinstance(output, tuple):
                    found["residual"] = output[1].clone()

        return keep

    def route(self, layer: int, hidden: Any, logits: torch.Tensor, weights: Any, ids: torch.Tensor) -> None:
        self.ids[layer], self.logits[layer] = ids.long().clone(), logits.clone()


_reading: list[Reading] = []


def _read(worker: Any) -> None:
    _reading.append(Reading(worker))


class Known:
    """Counts over texts, by layer.

    Attributes:
        right: input -> float64 [L, NAMES], rows whose expert of this rank was chosen; ``first``: rows whose first one
            is the router's first.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.rows = 0
        self.right = {name: np.zeros((layers, NAMES)) for name in INPUTS}
        self.first = {name: np.zeros(layers) for name in INPUTS}
        self.cosine = {"attention": np.zeros(layers), "hidden": np.zeros(layers)}
        self.distinct = {count: [0.0, 0] for count in NEIGHBOURS}
        self.shared, self.pairs = 0, 0
        self.entropy = {"predicted": np.zeros(layers), "router": np.zeros(layers)}
        self.counts = np.zeros((layers, experts))

    def add(self, found: Reading, rows: int, weight: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor) -> None:
        self.rows += rows
        for layer in range(len(weight)):
            ours, drafts = ({k: v[:rows] for k, v in found.found[m, layer].items()} for m in ("target", "draft"))
            ids, logits = found.ids[layer][:rows], found.logits[layer][:rows]
            residual = drafts["residual"]
            inputs = {"served": drafts["hidden"], "attention": drafts["attention"]}
            inputs["norm"] = residual * (residual.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm[layer]
            if layer:
                inputs["below"] = found.found["draft", layer - 1]["hidden"][:rows]
                inputs["ahead"] = found.found["target", layer - 1]["hidden"][:rows] * norm[layer] / norm[layer - 1]
            for name, hidden in inputs.items():
                scores = hidden @ weight[layer].T + bias[layer]
                best = scores.topk(NAMES).indices
                self.right[name][layer] += (best[:, :, None] == ids[:, None]).any(2).sum(0).numpy()
                self.first[name][layer] += int((best[:, 0] == logits.argmax(1)).sum())
                if name == "served":
                    self.entropy["predicted"][layer] += float(entropy(scores.softmax(-1)).sum())
            self.entropy["router"][layer] += float(entropy(logits.softmax(-1)).sum())
            for name, sums in self.cosine.items():
                sums[layer] += float(torch.cosine_similarity(drafts[name], ours[name], dim=1).sum())
            self.counts[layer] += np.bincount(ids.flatten().numpy(), minlength=len(bias[layer]))
            self._neighbours(ids.numpy(), len(bias[layer]))

    def _neighbours(self, ids: np.ndarray, experts: int) -> None:
        used = np.zeros((len(ids), experts), dtype=bool)
        np.put_along_axis(used, ids, True, axis=1)
        for count, sums in self.distinct.items():
            for start in range(0, len(ids) - count + 1, count):
                sums[0] += used[start : start + count].any(0).mean()
                sums[1] += 1
        self.shared += int((used[1:] & used[:-1]).sum())
        self.pairs += len(ids) - 1

    def result(self, top_k: int) -> dict[str, Any]:
        share = self.counts / self.counts.sum(1, keepdims=True)
        found: dict[str, Any] = {"rows": self.rows, "inputs": INPUTS, "by_input": {}}
        for name, right in self.right.items():
            known = right[1 if name in ("below", "ahead") else 0 :] / self.rows
            found["by_input"][name] = {
                "named_right": {str(k): float(known[:, :k].mean()) for k in (1, 2, 4, 6, top_k)},
                "recall": {str(k): float(known[:, :k].sum(1).mean() / top_k) for k in (1, 2, 4, 6, top_k, NAMES)},
                "first_is_first": float(self.first[name].sum() / self.rows / len(known)),
                "recall_by_layer": [float(layer[:top_k].sum() / top_k) for layer in right / self.rows],
            }
        found["first_by_layer"] = (self.right["served"][:, 0] / self.rows).tolist()
        found["cosine_by_layer"] = {name: (sums / self.rows).tolist() for name, sums in self.cosine.items()}
        found["cosine"] = {name: float(sums.mean() / self.rows) for name, sums in self.cosine.items()}
        found["distinct_share"] = {str(count): sums / n for count, (sums, n) in self.distinct.items()}
        found["shared_by_neighbours"] = self.shared / self.pairs / top_k
        bits = {name: float(sums.mean() / self.rows) for name, sums in self.entropy.items()}
        counted = float(entropy(torch.from_numpy(share)).mean())
        found["entropy_bits"] = bits | {"frequency": counted, "uniform": math.log2(self.counts.shape[1])}
        return found


def entropy(probabilities: torch.Tensor) -> torch.Tensor:
    """Bits of each row."""
    return -(probabilities * probabilities.clamp(min=1e-12).log2()).sum(-1)


def read_texts(count: int, length: int) -> dict[str, Any]:
    """The first part, in a process of its own."""
    target = ROOT / MODELS / "target"
    texts = [each["prompt_token_ids"] for each in held.windows(held.beside(target), "held", count, length)]
    with serving({}, 1, length + 16) as llm:
        llm.collective_rpc(_read)
        [reading], layers = _reading, len(llm.collective_rpc(_layers)[0])
        weight, bias, norm = router_weights.read(target, llm.collective_rpc(_layers)[0])
        known = Known(layers, weight.shape[1])
        for ids in texts:
            reading.found.clear()
            engine.read(llm, ids)
            known.add(reading, len(ids), weight, bias, norm)
    return known.result(reading.ids[0].shape[1]) | {"texts": {"files": count, "tokens": count * length}}


def _layers(worker: Any) -> tuple[str, ...]:
    return worker._spac_experts().runtime.executions[0].shape.layers


# -- served ------------------------------------------------------------------------------------------------------------


class Steps:
    """Keeps what the predictor names of each step: int16 [rows, L, k], or None without drafts."""

    def __init__(self, worker: Any) -> None:
        runtime = worker._spac_experts().runtime
        self.named: list[np.ndarray | None] = []
        begin = runtime.begin_step

        def begun(step: Any) -> None:
            read = step.draft is not None and step.draft.ndim == 3
            self.named.append(step.draft.numpy().astype(np.int16) if read else None)
            begin(step)

        runtime.begin_step = begun


_steps: list[Steps] = []


def _watch(worker: Any) -> None:
    _steps.append(Steps(worker))


def serve(knobs: dict[str, Any], drafts: int, count: int, words: int, new: int) -> tuple[dict, list, list]:
    """What an engine counts while it answers ``count`` prompts, what it says, and what it named of each step."""
    asked = prompts.load(ROOT / MODELS / "target", count, words, 0)
    with serving(knobs, drafts, words + new + 16) as llm:
        import vllm_spac

        llm.collective_rpc(_watch)
        said = engine.generate(llm, asked.ids, new)
        [stats] = vllm_spac.stats(llm)["workers"]
    return stats, said, _steps[0].named


# -- replays -----------------------------------------------------------------------------------------------------------


class Drafted(SlotsReplay):
    """A replay in whose draft phases the predictor names what it named of the same step in an engine.

    ``named``: as of ``Steps``; ``by_layer``: each layer of the draft model names experts, not each of its forwards.
    """

    named: list[np.ndarray | None]
    by_layer = False

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        names, self._now = self.named[step], None
        prefetcher = self.layers.loader.prefetcher
        if names is not None and not self.has_prompts(step) and drafting:
            ids = torch.from_numpy(names.astype(np.int64))
            read = int((ids[:, 0, 0] >= 0).sum())
            for row in range(read):
                parts = ids.shape[1] if self.by_layer else 1
                for part in range(parts):
                    self.link.run(drafting / read / parts)
                    known = ids[: row + 1].clone()
                    if self.by_layer:
                        known[row, part + 1 :] = -1
                    prefetcher.draft(PredictorInputs(START, draft_ids=known))
            self._now, drafting = ids, 0.0
        super().begin_step(step, drafting, layers)

    def _seen(self) -> PredictorInputs | None:
        return None if self._now is None else PredictorInputs(START, draft_ids=self._now)


def replayed(
    trace: Trace,
    named: list[np.ndarray | None],
    costs: Costs,
    share: float,
    prefetch: str = "off",
    policy: str = "lru",
    by_layer: bool = False,
    nbytes: int = EXPERT,
) -> Outcome:
    """Replays the trace with ``share`` of the experts, of ``nbytes`` each, in slots."""
    slots = math.ceil(share * trace.facts.total)
    outcome = Outcome(policy, "none", slots, share, prefetch=prefetch)
    ahead = PrefetchSettings.of(prefetch) if prefetch.startswith("draft") else build_prefetch(prefetch, trace)
    chosen = build_policy(policy, trace, slots, prefetch=prefetch)
    kind = SlotsReplay if not prefetch.startswith("draft") else Drafted
    replay = kind(trace, costs, nbytes, outcome, chosen, None, ahead)
    if isinstance(replay, Drafted):
        replay.named, replay.by_layer = named, by_layer
    replay.fill(filling(trace, slots))
    return replay.run(rows_of_records(trace))


def facts(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    """What is published of a replay; ``base``: the same without reads ahead."""
    read = max(1, outcome.prefetches)
    return {
        "tpot_ms": 1e3 * (outcome.tpot or 0.0),
        "gain": (base.tpot or 0.0) / (outcome.tpot or 1.0),
        "hit_rate": outcome.hit_rate,
        "read": outcome.prefetches,
        "used": outcome.prefetch_hits / read,
        "wasted": outcome.prefetch_wasted / read,
        "harmful": outcome.prefetch_harmful / read,
        "bytes": outcome.bytes / base.bytes,
    }


def as_in_the_paper(trace: Trace, costs: Costs) -> Costs:
    """``costs`` with drafts so long that they take the paper's share of the time of steps with loads on demand."""
    without = costs.model_copy(update={"draft": 0.0})
    seconds = replayed(trace, [], without, 0.25).seconds
    drafts = replayed(trace, [], without.model_copy(update={"draft": 1.0}), 0.25).seconds - seconds
    return costs.model_copy(update={"draft": seconds * SHARE / (1 - SHARE) / drafts})


def replays(trace: Trace, named: list, profile: str) -> dict[str, Any]:
    """The third part, of one machine."""
    costs, layers = Costs.read(profile), trace.facts.layers
    drafts = {"profile": costs, "paper": as_in_the_paper(trace, costs)}
    found: dict[str, Any] = {"draft_ms": {name: 1e3 * each.draft for name, each in drafts.items()}, "cutoffs": []}
    for name, each in drafts.items():
        for share in (0.125, 0.25, 0.5):
            base = replayed(trace, named, each, share)
            for k in (2, 8) if share == 0.25 else (8,):
                ways = {f"{cutoff}": f"@cutoff={cutoff}" for cutoff in range(0, layers + 1, 5)} | {"learned": ""}
                for cutoff, more in ways.items():
                    outcome = replayed(trace, named, each, share, f"draft_gate@k={k}{more}")
                    point = {"drafts": name, "share": share, "k": k, "cutoff": cutoff}
                    found["cutoffs"].append(point | facts(outcome, base))
    base = replayed(trace, named, drafts["paper"], 0.25)
    found["by_layer"] = [
        {"cutoff": cutoff}
        | facts(replayed(trace, named, drafts["paper"], 0.25, f"draft_gate@k=8@cutoff={cutoff}", by_layer=True), base)
        for cutoff in (5, 10, 20)
    ]
    found["others"] = [
        {"share": share, "way": name} | facts(replayed(trace, named, drafts["paper"], share, way, policy), base)
        for share in (0.125, 0.25, 0.5)
        for base in [replayed(trace, named, drafts["paper"], share)]
        for name, way, policy in OTHERS
    ]
    return found


def of_length(trace: Trace, named: list, costs: Costs) -> Iterator[dict[str, Any]]:
    """Yields the ways of ``OTHERS`` and the paper's, with a quarter of the experts in slots."""
    base = replayed(trace, named, costs, 0.25)
    tokens = float(trace.step_tokens[trace.step_tokens > 0].mean())
    for name, way, policy in (*OTHERS, ("draft_gate", "draft_gate@k=8", "lru")):
        point = {"way": name, "tokens_a_step": tokens}
        yield point | facts(replayed(trace, named, costs, 0.25, way, policy), base)


@app.main
def main(
    texts: Annotated[int, typer.Option(min=1, help="Held-out texts that are read.")] = 10,
    length: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 384,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts that engines answer.")] = 5,
    new: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    drafts: Annotated[int, typer.Option(min=1, help="Draft tokens of a step.")] = 4,
    profiles: Annotated[str, typer.Option(help="Machines of the replays.")] = "rtx4090",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "real_sp_moe.json",
) -> None:
    origin, path = provenance(), ROOT / WORK / "run.trace"
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as apart:
        known = apart.submit(read_texts, texts, length).result()
        asked = drafts, count, 64, new
        recording = {"prefetch": f"draft_gate@k={NAMES}", "record": f"trace={path}"}
        _, recorded, named = apart.submit(serve, recording, *asked).result()
        ways = {"off": "off", "learned": "draft_gate", "cutoff": "draft_gate@k=8@cutoff=20@extra=1.0"}
        served = {}
        for name, prefetch in ways.items():
            stats, said, _ = apart.submit(serve, {"slots": "25%", "prefetch": prefetch}, *asked).result()
            counters = ("hits", "misses", "loads", "prefetches", "prefetch_hits", "prefetch_late", "prefetch_wasted")
            served[name] = {each: stats[each] for each in counters} | {"same_tokens": said == recorded}
        trace = Trace.load(path)
        assert len(named) == trace.steps, "a step of the trace is not one that was watched"
        simulated = {name: replays(trace, named, name) for name in profiles.split(",")}
        for drafted in LENGTHS:
            _, said, names = apart.submit(serve, recording, drafted, *asked[1:]).result()
            steps, same = Trace.load(path), {"drafts": drafted, "same_tokens": said == recorded}
            for name, each in simulated.items():
                costs = Costs.read(name).model_copy(update={"draft": each["draft_ms"]["paper"] / 1e3})
                each.setdefault("lengths", []).extend(same | way for way in of_length(steps, names, costs))
    tokens = float(trace.step_tokens[trace.step_tokens > 0].mean())
    result: dict[str, Any] = {
        "provenance": origin,
        "toy_model": False,
        "texts": known,
        "served": served,
        "recorded": {
            "steps": trace.steps,
            "tokens_a_step": tokens,
            "drafts": drafts,
        },
        "simulated": simulated,
        "expert_bytes": EXPERT,
        "draft_share": SHARE,
    }
    write_result(output, result)
    show("named that are chosen", [{"input": n} | v["named_right"] for n, v in known["by_input"].items()], "input", "1")
    for name, each in result["simulated"].items():
        columns = ("drafts", "share", "k", "cutoff", "gain", "hit_rate", "used", "wasted")
        show(f"{name}, simulated", each["cutoffs"], *columns)


if __name__ == "__main__":
    app()
