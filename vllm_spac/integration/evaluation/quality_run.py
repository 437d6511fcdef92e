"""A whole quality sweep: reads earlier results, runs the missing points, and writes each result immediately."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from vllm_spac.errors import ConfigError
from vllm_spac.evaluation import points
from vllm_spac.evaluation.points import Point
from vllm_spac.evaluation.prompts import checksum
from vllm_spac.evaluation.reconstruction import together
from vllm_spac.integration.evaluation.sweep import Sweep
from vllm_spac.system.atomic_write import replacing
from vllm_spac.system.provenance import provenance
from vllm_spac.system.untrusted import parse_json, read_text

FORMAT = "spac-quality-1"
_LAYERS, _WINDOWS = 8, 64  # maximum layers and windows of the reconstruction study
_SIZES = (1, 2, 3, 5, 9, 17, 33, 63, 127, 255)  # rows per step, up to the length of the texts


class QualityRun:
    """One run of ``vllm-spac quality``.

    Args:
        llm: the engine, from ``engine.engine``.
        texts: token ids.
        run: settings that all results of a file share: window, slots, drafts.
        asked: rankings, coverages, budgets, masses, ``mass_of``, alphas and ``speculate``.
        path: the file of results; those of the same model, texts and run are not run again.
        progress: shows the progress.
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
        results["verdict"] = points.verdict(results["points"])
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
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as partial:
                partial.write_text(text)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error}; name another folder with --output") from error
