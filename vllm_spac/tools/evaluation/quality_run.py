"""A quality sweep: reads earlier results, runs the missing points in one engine, and writes each result immediately."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel
from vllm_spac.tools.evaluation.points import Point
from vllm_spac.tools.evaluation.prompts import checksum


class Sweep:
    """One model and its texts; ``step`` is called after each text."""

    def __init__(self, llm: Any, texts: Sequence[list[int]], step: Callable[[], None]) -> None:
        self.llm, self.texts, self.step, self.model = llm, texts, step, EvaluatedModel(llm)
        self.facts = self.model.facts()
        self.everything = Point("selected", "truncation", budget=self.facts["experts"])  # exact, but counts experts
        self._exact: list[list[int]] = []

    def score(self, settings: dict, reference: bool = False) -> dict:
        """Returns the scores of all texts under a budget, beside those of the ``reference``, which comes first."""
        with self.model.under(settings):
            self.model.counters.reset()
            self.model.scoring.begin(reference)
            for ids in self.texts:
                engine.read(self.llm, ids)
                self.model.scoring.end_text(ids)
                self.step()
            scores, counted = self.model.scoring.end(), self.model.counters.snapshot()
        if counted["shortlists"]:
            scores |= {"distinct": counted["experts"] / counted["shortlists"], "dropped": counted["dropped_share"]}
        return scores

    def generate(self, point: Point | None, prompts: Sequence[list[int]], new_tokens: int) -> dict:
        """Generates after each prompt, one at a time; ``point`` None is the unbudgeted model and must come first.

        Returns:
            ``tokens_per_second``, ``acceptance_length``, ``hit_rate`` and ``bytes_per_token`` of fast memory,
            ``distinct`` experts per layer and verify step, ``dropped`` routing weight, and ``equal``: the share of the
            tokens before the first that differs.
        """
        with self.model.under({} if point is None else point.settings("verify")):
            if point is None:
                engine.generate(self.llm, prompts[:1], new_tokens)  # warm-up
            outputs, measured = self._timed(prompts, new_tokens)
        if point is None:
            self._exact = outputs
            with self.model.under(self.everything.settings("verify")):
                measured["distinct"] = self._timed(prompts, new_tokens)[1]["distinct"]
        same = sum(_common(ours, theirs) for ours, theirs in zip(outputs, self._exact, strict=True))
        return measured | {"equal": same / (len(prompts) * new_tokens)}

    def _timed(self, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], dict]:
        before, begin = self._counts(), time.perf_counter()
        outputs = []
        for ids in prompts:
            outputs += engine.generate(self.llm, [ids], new_tokens)
            self.step()
        seconds, tokens = time.perf_counter() - begin, len(prompts) * new_tokens
        more = {name: count - before[name] for name, count in self._counts().items()}
        return outputs, {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "acceptance_length": 1 + more["num_accepted_tokens"] / max(1, more["num_drafts"]),
            "hit_rate": more["hits"] / max(1, more["hits"] + more["misses"]),
            "bytes_per_token": more["bytes"] / tokens,
            "distinct": more["experts"] / more["shortlists"] if more["shortlists"] else None,
            "dropped": more["dropped_weight"] / more["rows"] if more["rows"] else 0.0,
        }

    def _counts(self) -> dict[str, float]:
        """Counters of the engine: drafts, fast memory, and the budget."""
        counts: dict[str, float] = dict.fromkeys(("num_drafts", "num_accepted_tokens"), 0)
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if name in counts:
                counts[name] += metric.value
        stats = vllm_spac.stats(self.llm)["workers"][0]
        counts |= {"hits": stats["hits"], "misses": stats["misses"], "bytes": sum(stats["bytes"].values())}
        return counts | {name: stats["budget"][name] for name in ("shortlists", "experts", "rows", "dropped_weight")}


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(ours))


FORMAT = "spac-quality-1"


class QualityRun:
    """One run of ``vllm-spac quality sweep``.

    Args:
        run: settings that all results of a file share: window, slots, drafts.
        asked: rankings, coverages, budgets, masses, ``mass_of`` and ``speculate``.
        path: the file of results; those of the same model, texts and run are not run again.

    Raises:
        ConfigError: a point cannot be run, or the file holds results of another run.
    """

    def __init__(self, llm: Any, texts: list, run: dict, asked: dict, path: Path, progress: Progress) -> None:
        self._texts, self._path, self._progress = texts, path, progress
        self._sweep = Sweep(llm, texts, lambda: progress.advance(self._task))
        self._task: Any = None
        facts = self._sweep.facts
        sizes = {"count": len(texts), "tokens": sum(map(len, texts)), "checksum": checksum(texts)}
        self._run = run | {"fingerprint": facts["fingerprint"], "texts": sizes}
        self._points, skipped = points.points(**asked, facts=facts)
        for point in self._points:
            if point.speculated:  # what the engine refuses is refused before anything is run
                with self._sweep.model.under(self._cutting(point)):
                    pass
        self._results = self._earlier() | {
            "format": FORMAT,
            "run": self._run,
            "window": run["window"],
            "facts": facts,
            "skipped": skipped,
            "title": f"{facts['model']}: {sizes['tokens']:,} tokens",
            "step_bytes_per_expert": facts["expert_bytes"] * len(facts["layers"]),
        }

    def all(self) -> dict:
        """Runs what is missing; returns the results as written. ``sessions`` records which run measured which points.

        Raises:
            ConfigError: the file cannot be written.
        """
        results = self._results
        known = {part: len(results[part]) for part in ("points", "generation")}
        results["sessions"] = [*results.get("sessions", []), provenance() | {"known": known}]
        self._write()
        self._scores()
        if self._run["drafts"] or any(point.speculated for point in self._points):
            self._generation()
        results["verdict"] = points.verdict(results["points"], results["generation"])
        results["provenance"] = results["sessions"][-1]
        self._write()
        return results

    def _scores(self) -> None:
        results, missing = self._results, self._missing("points")
        self._show("quality", (1 + ("natural" not in results) + len(missing)) * len(self._texts))
        results["reference"] = self._sweep.score({}, reference=True)
        if "natural" not in results:
            results["natural"] = self._sweep.score(self._cutting(self._sweep.everything))
        for point in missing:
            results["points"].append(asdict(point) | self._sweep.score(self._cutting(point)))
            self._write()

    def _generation(self) -> None:
        drafts, results = bool(self._run["drafts"]), self._results
        missing = [point for point in self._missing("generation") if drafts or point.speculated]
        prompts, new_tokens = self._texts[: self._run["generate"]], self._run["new_tokens"]
        self._show("generation", (len(missing) + 2) * len(prompts))
        exact = self._sweep.generate(None, prompts, new_tokens)
        if not any(item.get("ranking") is None for item in results["generation"]):
            results["generation"].append(exact)
        for point in missing:
            results["generation"].append(asdict(point) | self._sweep.generate(point, prompts, new_tokens))
            self._write()

    def _cutting(self, point: Point) -> dict:
        """Returns the settings of a point for whole texts, which are cut by as many rows as a verify step has."""
        return point.settings("all", self._run["window"])

    def _missing(self, part: str) -> list[Point]:
        known = {Point.of(item) for item in self._results[part]}
        return [point for point in self._points if point not in known]

    def _show(self, what: str, total: int) -> None:
        self._task = self._progress.add_task(what, total=total)

    def _earlier(self) -> dict:
        """Results that the file has of this run; without it, none."""
        if not self._path.exists():
            return {"points": [], "generation": []}
        try:
            earlier = parse_json(read_text(self._path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}; name another folder with --output") from error
        if not isinstance(earlier, dict) or earlier.get("format") != FORMAT or earlier.get("run") != self._run:
            raise ConfigError(
                f"{self._path} holds results of another model, texts, window, slots or drafts; name another folder "
                "with --output, or delete it"
            )
        return earlier

    def _write(self) -> None:
        text = json.dumps(self._results, indent=1, allow_nan=False) + "\n"
        with writing(self._path, "name another folder with --output"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, text)
