"""Reads ahead under a budget: how many are used, evicted unused, or evict what is then needed. Counts, no times.

    python benchmarks/serving/ahead.py

Real engines answer held-out text with draft trees, a budget and votes by path, each in a process of its own: by
predictors that look one layer ahead where the host decides and where the device does (by the kernels' torch twins), and
by one that looks while drafts are made. Twice: with the names cut to the budget alone, and down to the depth that
``vllm_spac/cache/allowance.py`` learns besides. Of the latter also what hindsight would read: of the names without a
slot in the same steps, by the best depth of each layer, as many used ones as there are with at most ``extra`` unused
ones for each. No rule that cuts the same ranking can do better.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy"))
import predictors
import prompts
from common import RESULTS, ROOT, is_toy, provenance, show, write_result

from vllm_spac.tools.evaluation import engine

MODELS = Path("benchmarks") / "toy" / "models"  # from the checkout's root, with target and eagle3
FILE = predictors.WORK / "ahead.predictors.safetensors"
WAYS = (("linear", "host"), ("gate", "host"), ("draft_linear", "host"), ("linear", "device"), ("gate", "device"))
EXTRA = 0.1  # the default of all predictors
COUNTED = "misses", "prefetches", "prefetch_hits", "prefetch_wasted", "prefetch_harmful"


class Named:
    """Sums what ``Depths`` is told of each predictor's steps: by layer and place, names without a slot and used ones.

    ``bounded``: False for names that are cut to the budget alone.
    """

    def __init__(self, bounded: bool) -> None:
        from vllm_spac.cache.allowance import Depths

        self.named: dict[int, np.ndarray] = {}  # of each instance
        self.used: dict[int, np.ndarray] = {}
        learn, named, used = Depths.end_step, self.named, self.used

        def end_step(depths: Any, places: np.ndarray, chosen: np.ndarray) -> None:
            keys = np.flatnonzero(places >= 0)
            experts = len(places) // len(depths.depths)
            at = keys // experts * experts + places[keys]
            for sums, found in ((named, at), (used, at[chosen[keys]])):
                sums[id(depths)] = sums.get(id(depths), 0) + np.bincount(found, minlength=len(places))
            learn(depths, places, chosen)
            if not bounded:
                depths.depths = np.full(len(depths.depths), experts)

        Depths.end_step = end_step  # type: ignore[method-assign]

    def hindsight(self, layers: int) -> dict[str, int]:
        """What the best depth of each layer would have read, and what was named without a slot."""
        best = {"read": 0, "used": 0}
        for instance, counts in self.named.items():
            named, used = (each.reshape(layers, -1).cumsum(1) for each in (counts, self.used[instance]))
            for layer in range(layers):
                pays = np.flatnonzero(used[layer] * (1 + EXTRA) >= named[layer])
                if len(pays) and named[layer, pays[-1]]:
                    best["read"] += int(named[layer, pays[-1]])
                    best["used"] += int(used[layer, pays[-1]])
        every = {"named": int(sum(each.sum() for each in self.named.values()))}
        return best | every | {"named_used": int(sum(each.sum() for each in self.used.values()))}


def served(model: Path, knobs: dict[str, Any], bounded: bool, asked: list[list[int]], new: int) -> dict[str, Any]:
    """What an engine counts while it answers; in a process of its own."""
    import vllm_spac

    named = Named(bounded)
    speculation = {"method": "eagle3", "model": str(ROOT / model / "eagle3")}
    options = {"dtype": "float32", "speculative_config": speculation, "block_size": 32, "max_num_batched_tokens": 256}
    spac = {"store": "host", "guard": "off", "predictor_file": str(ROOT / FILE)} | knobs
    length = max(map(len, asked)) + new + 16
    with engine.engine(
        str(ROOT / model / "target"), spac, length, False, kv_cache_memory_bytes=1 << 28, **options
    ) as llm:
        said = engine.generate(llm, asked, new)
        [stats] = vllm_spac.stats(llm)["workers"]
        layers = len(llm.collective_rpc(_layers)[0])
    found = {name: stats[name] for name in COUNTED} | {"steps": stats["steps"]["verify"]}
    return found | {"said": said, "hindsight": named.hindsight(layers)}


def _layers(worker: Any) -> tuple[str, ...]:
    return worker._spac_experts().runtime.executions[0].shape.layers


def main(
    model: Annotated[Path, typer.Argument(help="Folder of target and eagle3.")] = MODELS,
    slots: Annotated[str, typer.Option(help="Experts in slots.")] = "25%",
    tree: Annotated[int, typer.Option(min=2, help="Nodes of a draft tree.")] = 16,
    budget: Annotated[int, typer.Option(min=1, help="Experts per layer and step.")] = 16,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts.")] = 4,
    words: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of each.")] = 96,
    new: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of each answer.")] = 48,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_ahead.json",
) -> None:
    origin, asked = provenance(), prompts.load(ROOT / model / "target", count, words, 0)
    if not (ROOT / FILE).is_file():
        (ROOT / FILE).parent.mkdir(parents=True, exist_ok=True)
        texts = predictors.write_texts("training", ROOT / FILE.parent, ROOT / model / "target")
        head, only = f"{model}/eagle3", "gate,linear,draft_linear,token_table"
        predictors.train(model / "target", texts, FILE, 1, only, head)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as apart:
        for name, plane in WAYS:
            for bounded in (False, True):
                knobs = {"slots": slots, "tree": tree, "budget": budget, "budget_votes": "path@alpha=0.5"}
                knobs |= {"prefetch": name, "decisions": plane}
                row = apart.submit(served, model, knobs, bounded, asked.ids, new).result()
                rows.append({"predictor": name, "decisions": plane, "depth": bounded} | row)
    same = {plane: [row.pop("said") for row in rows if row["decisions"] == plane] for plane in ("host", "device")}
    result = {"provenance": origin, "toy_model": is_toy(model), "prompts": asked.describe(), "output_tokens": new}
    result |= {"slots": slots, "tree": tree, "budget": budget, "rows": rows}
    result["same_tokens"] = {plane: all(each == said[0] for each in said) for plane, said in same.items()}
    write_result(output, result)
    show("reads ahead", rows, "predictor", "decisions", "depth", *COUNTED)


if __name__ == "__main__":
    typer.run(main)
