"""Reads ahead under a budget: how many are used, evicted unused, or evict what is then needed. Counts, no times.

    python benchmarks/replay/ahead.py

A real engine answers held-out text with draft trees, a budget and votes by path; what its layers read and chose, and
what its drafter knew, is kept. The executions of serving run these steps again with a part of the experts in slots and
each predictor, where the host decides (reads end at once), and where the device does (the kernels' torch twins).
Nothing is computed. Three ways: each row names its own; the names cut to the budget; and down to the depth that
``vllm_spac/cache/allowance.py`` learns besides, as in serving. Of the last also what hindsight would read: of the names
without a slot in the same steps, by the best constant depth of each layer, as many used ones as there are with at most
``extra`` unused ones for each. Reads of the next layer for prompts (``LayerUse``) are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy"))
import predictors
import prompts
from common import RESULTS, ROOT, is_toy, provenance, show, write_result

from vllm_spac import components
from vllm_spac.cache import transfers
from vllm_spac.cache.allowance import Depths
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import MoEShape, Step, TensorSpec
from vllm_spac.decisions.predictor_file import PredictorFile
from vllm_spac.decisions.predictors.base import DRAFTING
from vllm_spac.execution.base import Rows
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.slots_execution import SlotExecution
from vllm_spac.tools.evaluation import engine

MODELS = Path("benchmarks") / "toy" / "models"  # from the checkout's root, with target and eagle3
FILE = predictors.WORK / "ahead.predictors.safetensors"
RUNS = (("linear", "host"), ("gate", "host"), ("draft_linear", "host"), ("linear", "device"), ("gate", "device"))
WAYS = ("rows", "budget", "depth")
EXTRA = 0.1  # the default of all predictors
_OF_STEP = "tokens", "draft"
COUNTED = "hits", "misses", "prefetches", "prefetch_hits", "prefetch_wasted", "prefetch_harmful"


class Kept:
    """What an engine's layers read and chose, and its drafter knew, in order.

    Attributes:
        drafts: number of the step that they were made for, and what ``SlotExecution.draft`` was passed.
        steps: of each layer its number, input, weights and ids.
    """

    def __init__(self) -> None:
        self.drafts: list[tuple[int, Tensor, Tensor]] = []
        self.steps: list[tuple[Step, list[tuple[int, Tensor, Tensor, Tensor]]]] = []
        self.shape: MoEShape | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keeps what this process's executions are passed while the block runs."""
        begin, forward, draft = SlotExecution.begin_step, SlotExecution.forward, SlotExecution.draft
        live = False

        def begun(execution: SlotExecution, step: Step) -> None:
            nonlocal live
            if live := bool(step.requests):
                self.shape = execution.shape
                copies: dict[str, Any] = {
                    name: None if (one := getattr(step, name)) is None else one.clone() for name in _OF_STEP
                }
                self.steps.append((replace(step, **copies), []))
            begin(execution, step)

        def forwarded(
            execution: SlotExecution, layer: int, x: Tensor, weights: Tensor, ids: Tensor, *rest: Any
        ) -> Tensor:
            if live:
                self.steps[-1][1].append((layer, x.clone(), weights.clone(), ids.clone()))
            return forward(execution, layer, x, weights, ids, *rest)

        def drafted(execution: SlotExecution, tokens: Tensor, read: Tensor) -> None:
            self.drafts.append((len(self.steps), tokens.clone(), read.clone()))
            draft(execution, tokens, read)

        SlotExecution.begin_step, SlotExecution.forward, SlotExecution.draft = begun, forwarded, drafted  # type: ignore
        try:
            yield
        finally:
            SlotExecution.begin_step, SlotExecution.forward, SlotExecution.draft = begin, forward, draft  # type: ignore


class Named:
    """Sums what ``Depths`` is told: by layer and place, names without a slot, and those of them that were used."""

    def __init__(self) -> None:
        self.counts: dict[int, list[np.ndarray]] = {}  # of each instance
        self._learn = Depths.end_step

    def end_step(self, depths: Depths, places: np.ndarray, used: np.ndarray) -> None:
        keys, experts = np.flatnonzero(places >= 0), len(places) // len(depths.depths)
        at = keys // experts * experts + places[keys]
        sums = self.counts.setdefault(
            id(depths), [np.zeros((len(depths.depths), experts), dtype=int) for _ in range(2)]
        )
        for counts, found in zip(sums, (at, at[used[keys]]), strict=True):
            counts += np.bincount(found, minlength=counts.size).reshape(counts.shape)
        self._learn(depths, places, used)

    def hindsight(self) -> dict[str, int]:
        """What was named without a slot, and what the best depth of each layer would have read."""
        best = dict.fromkeys(("named", "named_used", "read", "used"), 0)
        for named, used in self.counts.values():
            best["named"] += int(named.sum())
            best["named_used"] += int(used.sum())
            for theirs, right in zip(named.cumsum(1), used.cumsum(1), strict=True):
                pays = np.flatnonzero(right * (1 + EXTRA) >= theirs)
                best["read"] += int(theirs[pays[-1]]) if len(pays) else 0
                best["used"] += int(right[pays[-1]]) if len(pays) else 0
        return best


class AtOnce(transfers.Background):
    """Every read is over when it has been queued."""

    def fetch(self, loads: Any) -> None:
        super().fetch(loads)
        for ticket in list(self._tickets.values()):
            ticket.done.result()


class Nothing:
    """In place of vLLM's kernel."""

    activation, takes_slots, by_expert = "silu", True, False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        return x


class WithoutSums(PointerExecution):
    """Decides and copies; of its kernel the counts are left."""

    def _launch(self, tables, layer, x, ids, weights, live, activation, out):
        pairs = ids.flatten()[: int(live)].long()
        counts = torch.bincount(pairs[weights.flatten()[: len(pairs)] != 0], minlength=self.shape.experts)
        self._counts[layer].copy_(counts)
        return out


def on_host(kept: Kept, name: str, share: float) -> dict[str, Any]:
    shape = sized(kept, {"w": TensorSpec((1,), torch.float32)})
    slots, store = int(share * shape.total), filled("memory", shape)
    before, transfers.Background = transfers.Background, AtOnce  # type: ignore[misc]
    ahead = PrefetchSettings(prefetch=name, built=built(name), extra=EXTRA)
    policy, tensors = components.build("policies", "reuse"), {"w": torch.zeros(slots, 1)}
    made = SlotExecution(shape, slots, policy, store, tensors, io_threads=2, path="host", ahead=ahead)
    transfers.Background = before  # type: ignore[misc]
    with closing(made):
        list(made.fill())
        drafts = iter(kept.drafts if made.looks_at & DRAFTING else [])
        draft = next(drafts, None)
        for number, (step, layers) in enumerate(kept.steps):
            while draft is not None and draft[0] <= number:
                made.draft(*draft[1:])
                draft = next(drafts, None)
            made.begin_step(step)
            for layer, x, weights, ids in layers:
                made.forward(layer, x, weights, ids, Nothing(), Rows(len(x), as_routed=True))
            made.end_forward()
        return made.snapshot()


def on_device(kept: Kept, name: str, share: float) -> dict[str, Any]:
    width = kept.steps[0][1][0][1].shape[1]
    specs = {"w13_weight": TensorSpec((16, width), torch.float32), "w2_weight": TensorSpec((width, 8), torch.float32)}
    shape = sized(kept, specs)
    slots, store = int(share * shape.total), filled("host", shape)
    tensors = {part: torch.zeros(slots, *spec.shape) for part, spec in specs.items()}
    rows = max(step.rows for step, _ in kept.steps)
    ahead, policy = (
        PrefetchSettings(prefetch=name, built=built(name), extra=EXTRA),
        components.build("policies", "reuse"),
    )
    made = WithoutSums(shape, slots, policy, store, tensors, path="host", rows=rows, ahead=ahead)
    with closing(made):
        list(made.fill())
        for step, layers in kept.steps:
            made.begin_step(step)
            for layer, x, weights, ids in layers:
                made.run(layer, x, weights, ids, "silu", x)
            made.end_forward()
        return made.snapshot()


def sized(kept: Kept, tensors: dict[str, TensorSpec]) -> MoEShape:
    assert kept.shape is not None
    return MoEShape(kept.shape.layers, kept.shape.experts, kept.shape.top_k, tensors)


def filled(name: str, shape: MoEShape) -> Any:
    store = components.build("stores", name, shape=shape, fingerprint="")
    for key in range(shape.total):
        store.put(key, {part: torch.zeros(spec.shape) for part, spec in shape.tensors.items()})
    return store


def built(name: str) -> Any:
    return PredictorFile.read(ROOT / FILE).build(name, reach=1)


def replayed(kept: Kept, name: str, plane: str, way: str, share: float) -> dict[str, Any]:
    steps, learn, named = kept.steps, Depths.end_step, Named()

    def end_step(self: Depths, places: np.ndarray, used: np.ndarray) -> None:
        named.end_step(self, places, used)
        if way != "depth":
            self.depths = np.full(len(self.depths), len(places) // len(self.depths))

    Depths.end_step = end_step  # type: ignore[method-assign]
    if way == "rows":
        kept.steps = [(replace(step, bounds=None), layers) for step, layers in steps]
    try:
        stats = (on_host if plane == "host" else on_device)(kept, name, share)
    finally:
        kept.steps, Depths.end_step = steps, learn  # type: ignore[method-assign]
    found = {"predictor": name, "decisions": plane, "way": way, "slots": share} | {
        each: stats[each] for each in COUNTED
    }
    return found | ({"hindsight": named.hindsight()} if way == "depth" else {})


def recorded(model: Path, tree: int, budget: int, asked: list[list[int]], new: int) -> Kept:
    kept, length = Kept(), max(map(len, asked)) + new + 16
    speculation = {"method": "eagle3", "model": str(ROOT / model / "eagle3")}
    options = {"dtype": "float32", "speculative_config": speculation, "block_size": 32, "max_num_batched_tokens": 256}
    spac = {"slots": "50%", "store": "host", "guard": "off", "tree": tree, "budget": budget, "prefetch": "draft_linear"}
    spac |= {"budget_votes": "path@alpha=0.5", "predictor_file": str(ROOT / FILE)}
    options |= {"kv_cache_memory_bytes": 1 << 28}
    with engine.engine(str(ROOT / model / "target"), spac, length, False, **options) as llm, kept.watching():
        engine.generate(llm, asked, new)
    return kept


def main(
    model: Annotated[Path, typer.Argument(help="Folder of target and eagle3.")] = MODELS,
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
    kept = recorded(model, tree, budget, asked.ids, new)
    torch.set_num_threads(1)
    rows = [replayed(kept, name, plane, way, share) for share in (0.25, 0.5) for name, plane in RUNS for way in WAYS]
    result: dict[str, Any] = {"provenance": origin, "toy_model": is_toy(ROOT / model), "prompts": asked.describe()}
    result |= {"output_tokens": new, "tree": tree, "budget": budget, "extra": EXTRA, "steps": len(kept.steps)}
    write_result(output, result | {"rows": rows})
    show("reads ahead", rows, "predictor", "decisions", "slots", "way", *COUNTED)


if __name__ == "__main__":
    typer.run(main)
