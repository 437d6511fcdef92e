"""Runs the points of a quality sweep in one engine, changing the budget between them by RPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import vllm_spac
from vllm_spac.evaluation.points import Point
from vllm_spac.integration.evaluation import engine

_DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Sweep:
    """One model and its texts.

    Args:
        llm: from ``engine.engine``.
        texts: token ids.
        window: rows that are ranked together.
        step: called after each text.
    """

    def __init__(self, llm: Any, texts: Sequence[list[int]], window: int, step: Callable[[], None]) -> None:
        self.llm, self.texts, self.window, self.step = llm, texts, window, step
        self.facts = engine.ask(llm, "facts")
        self._exact: list[list[int]] = []

    # -- teacher-forced ------------------------------------------------------------------------------------

    def reference(self, every: int) -> dict:
        """Scores of the unbudgeted model, the reference for all others; keeps its routing for the study."""
        engine.ask(self.llm, "capture", self.window, every)
        scores = self._scored({}, reference=True, between=lambda: engine.ask(self.llm, "captured_text"))
        engine.ask(self.llm, "end_capture")
        return scores

    def natural(self) -> dict:
        """Scores with a budget of all experts: exact, but distinct experts are counted."""
        return self._scored(self._everything("all", self.window))

    def score(self, point: Point) -> dict:
        """Scores of one point."""
        return self._scored(point.settings("all", self.window))

    def check(self, point: Point) -> None:
        """Raises what the engine refuses of a point before anything is run."""
        self._set(point.settings("all", self.window))
        self._set({})

    def study(
        self, layers: Sequence[int], budgets: Sequence[int], rankings: Sequence[str], coverages: Sequence[str]
    ) -> Iterator[dict]:
        """Reconstruction errors of each layer; see ``Study.reconstruction``."""
        for layer in layers:
            yield engine.ask(self.llm, "reconstruction", layer, list(budgets), list(rankings), list(coverages))

    def routing(self, sizes: Sequence[int], budgets: Sequence[int], coverage: str) -> list[dict]:
        """See ``Study.routing``."""
        return engine.ask(self.llm, "routing", list(sizes), list(budgets), coverage)

    def _scored(self, settings: dict, reference: bool = False, between: Callable[[], None] | None = None) -> dict:
        self._set(settings)
        engine.ask(self.llm, "score", reference)
        for ids in self.texts:
            if settings.get("votes") == "path":
                engine.ask(self.llm, "weigh", ids, self.window)
            engine.read(self.llm, ids)
            engine.ask(self.llm, "scored_text", ids)
            if between is not None:
                between()
            self.step()
        scores = engine.ask(self.llm, "scores")
        self._set({})
        counted = scores.pop("budget")
        if counted["shortlists"]:
            scores |= {"distinct": counted["experts"] / counted["shortlists"], "dropped": counted["dropped_share"]}
        return scores

    # -- generation ----------------------------------------------------------------------------------------

    def generate(self, point: Point | None, prompts: Sequence[list[int]], new_tokens: int) -> dict:
        """Generates after each prompt, one at a time; ``point`` None is the unbudgeted model and must come first.

        Returns:
            ``tokens_per_second``, ``acceptance_length``, ``hit_rate`` and ``bytes_per_token`` of fast memory,
            ``distinct`` experts per layer and verify step, ``dropped`` routing weight, and ``equal``: the share of the
            tokens before the first that differs.
        """
        self._set({} if point is None else point.settings("verify"))
        if point is None:
            engine.generate(self.llm, prompts[:1], new_tokens)  # warm-up
        outputs, found = self._timed(prompts, new_tokens)
        if point is None:
            self._exact = outputs
            self._set(self._everything("verify", None))
            found["distinct"] = self._timed(prompts, new_tokens)[1]["distinct"]
        self._set({})
        same = sum(_common(ours, theirs) for ours, theirs in zip(outputs, self._exact, strict=True))
        return found | {"equal": same / (len(prompts) * new_tokens)}

    def _timed(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], dict]:
        drafts, stats = self._drafts(), self._stats()
        begin = time.perf_counter()
        outputs = []
        for ids in prompts:
            outputs += engine.generate(self.llm, [ids], new_tokens)
            self.step()
        seconds, tokens = time.perf_counter() - begin, len(prompts) * new_tokens
        drafts = {name: value - drafts[name] for name, value in self._drafts().items()}
        after, budget = self._stats(), self._stats()["budget"]
        hits, misses = after["hits"] - stats["hits"], after["misses"] - stats["misses"]
        moved = sum(after["bytes"].values()) - sum(stats["bytes"].values())
        made = budget["shortlists"] - stats["budget"]["shortlists"]
        rows, dropped = (budget[name] - stats["budget"][name] for name in ("rows", "dropped_weight"))
        return outputs, {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "acceptance_length": 1 + drafts["num_accepted_tokens"] / max(1, drafts["num_drafts"]),
            "hit_rate": hits / max(1, hits + misses),
            "bytes_per_token": moved / tokens,
            "distinct": (budget["experts"] - stats["budget"]["experts"]) / made if made else None,
            "dropped": dropped / rows if rows else 0.0,
        }

    def _drafts(self) -> dict[str, int]:
        found = dict.fromkeys(_DRAFTS, 0)
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if name in found:
                found[name] += metric.value
        return found

    def _stats(self) -> dict:
        return vllm_spac.stats(self.llm)["workers"][0]

    def _set(self, settings: dict) -> None:
        self.llm.collective_rpc("spac_budget", args=(settings,))

    def _everything(self, when: str, window: int | None) -> dict:
        return Point("selected", "truncation", budget=self.facts["experts"]).settings(when, window)


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(ours))
