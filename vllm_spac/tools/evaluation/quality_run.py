"""A quality sweep: reads earlier results, runs the missing points in one engine, and writes each result immediately.

The budget is changed between two points by RPC.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

import vllm_spac
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import write_text, writing
from vllm_spac.system.machine import provenance
from vllm_spac.system.untrusted import parse_json, read_text
from vllm_spac.tools.evaluation import engine, points
from vllm_spac.tools.evaluation.points import Point
from vllm_spac.tools.evaluation.prompts import checksum
from vllm_spac.tools.evaluation.reconstruction import together

_DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Sweep:
    """One model and its texts."""

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


FORMAT = "spac-quality-1"
_LAYERS, _WINDOWS = 8, 64  # maximum layers and windows of the reconstruction study
_SIZES = (1, 2, 3, 5, 9, 17, 33, 63, 127, 255)  # rows per step, up to the length of the texts


class QualityRun:
    """One run of ``vllm-spac quality``.

    Args:
        run: settings that all results of a file share: window, slots, drafts.
        asked: rankings, coverages, budgets, masses, ``mass_of``, alphas and ``speculate``.
        path: the file of results; those of the same model, texts and run are not run again.
    """

    def __init__(self, llm: Any, texts: list, run: dict, asked: dict, path: Path, progress: Progress) -> None:
        self._texts, self._asked, self._path, self._progress = texts, asked, path, progress
        self._sweep = Sweep(llm, texts, run["window"], self._step)
        self._facts = self._sweep.facts
        sizes = {"count": len(texts), "tokens": sum(map(len, texts)), "checksum": checksum(texts)}
        self._run = run | {"fingerprint": self._facts["fingerprint"], "texts": sizes}
        self._points, skipped = points.points(**asked, facts=self._facts)
        weighted = [each for each in self._points if each.votes_alpha is not None]
        for point in (*weighted[:1], *(each for each in self._points if each.speculated)):
            self._sweep.check(point)
        self._results = self._earlier() | {"format": FORMAT, "run": self._run, "window": run["window"]}
        self._results |= {"facts": self._facts, "skipped": skipped}
        self._task: Any = None

    def all(self, title: str | None) -> dict:
        """Runs what is missing; returns the results as written. ``sessions`` records which run measured which points.

        Raises:
            ConfigError: the file holds results of another run, or cannot be written.
        """
        results = self._results
        results["title"] = title or f"{self._facts['model']}: {results['run']['texts']['tokens']:,} tokens"
        results["step_bytes_per_expert"] = self._facts["expert_bytes"] * len(self._facts["layers"])
        known = {part: len(results[part]) for part in ("points", "generation")}
        results["sessions"] = [*results.get("sessions", []), provenance() | {"known": known}]
        self._write()
        self._scores()
        self._study()
        if self._run["drafts"] or any(point.speculated for point in self._points):
            self._generation()
        results["verdict"] = points.verdict(results["points"], results["generation"])
        results["provenance"] = results["sessions"][-1]
        self._write()
        return results

    def _scores(self) -> None:
        results, missing = self._results, self._missing("points")
        self._show("quality", (1 + ("natural" not in results) + len(missing)) * len(self._texts))
        windows = sum(len(ids) // self._run["window"] for ids in self._texts)
        results["reference"] = self._sweep.reference(max(1, windows // _WINDOWS))
        if "natural" not in results:
            results["natural"] = self._sweep.natural()
        for point in missing:
            results["points"].append(asdict(point) | self._sweep.score(point))
            self._write()

    def _study(self) -> None:
        asked, results, count = self._asked, self._results, len(self._facts["layers"])
        budgets = asked["budgets"]
        step = max(1, len(budgets) // 3)
        coverage = "truncation" if self._facts["custom"] else "substitution"
        some = [b for b in budgets[::step] if coverage == "truncation" or b >= self._facts["top_k"]]
        sizes = sorted({*_SIZES, self._run["window"]})
        results["routing"] = {"budgets": some, "sizes": self._sweep.routing(sizes, some, coverage)}
        results["reconstruction"] = None
        if not budgets or all(len(ids) < self._run["window"] for ids in self._texts):
            return
        layers = sorted({index * count // min(count, _LAYERS) for index in range(min(count, _LAYERS))})
        self._show("reconstruction", len(layers))
        studies = []
        for study in self._sweep.study(layers, budgets, asked["rankings"], asked["coverages"]):
            studies.append(study)
            self._step()
        names = [self._facts["layers"][layer] for layer in layers]
        found = together(studies, asked["rankings"], asked["coverages"])
        results["reconstruction"] = {"layers": names} | found
        self._write()

    def _generation(self) -> None:
        drafts = bool(self._run["drafts"])
        missing = [point for point in self._missing("generation") if drafts or point.speculated]
        results = self._results
        prompts = self._texts[: self._run["generate"]]
        self._show("generation", (len(missing) + 2) * len(prompts))
        exact = self._sweep.generate(None, prompts, self._run["new_tokens"])
        if not any(item.get("ranking") is None for item in results["generation"]):
            results["generation"].append(exact)
        for point in missing:
            found = self._sweep.generate(point, prompts, self._run["new_tokens"])
            results["generation"].append(asdict(point) | found)
            self._write()

    def _missing(self, part: str) -> list[Point]:
        known = [{name: item.get(name) for name in Point.__dataclass_fields__} for item in self._results[part]]
        return [point for point in self._points if asdict(point) not in known]

    def _show(self, what: str, total: int) -> None:
        self._task = self._progress.add_task(what, total=total)

    def _step(self) -> None:
        self._progress.advance(self._task)

    def _earlier(self) -> dict:
        blank: dict[str, list] = {"points": [], "generation": []}
        if not self._path.exists():
            return blank
        try:
            found = parse_json(read_text(self._path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}; name another folder with --output") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("run") != self._run:
            raise ConfigError(
                f"{self._path} holds results of another model, texts, window, slots or drafts; name another folder "
                "with --output, or delete it"
            )
        return found

    def _write(self) -> None:
        text = json.dumps(self._results, indent=1, allow_nan=False) + "\n"
        with writing(self._path, "name another folder with --output"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, text)
