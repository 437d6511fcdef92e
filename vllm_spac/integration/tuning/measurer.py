"""Starts the engines that ``vllm-spac tune`` measures, each in a process of its own: its memory is free afterwards."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_spac.system.live_process import LiveProcess, LiveProcessError
from vllm_spac.tuning.candidate import Candidate
from vllm_spac.tuning.comparison import Said
from vllm_spac.tuning.measurer import Answer, Engine, Measurer, MeasuringError

_ENGINE = "vllm_spac.integration.tuning.engine"
_TIMEOUT = 3600.0  # seconds that a start, which may pack the experts, or an answer may take


class ProcessMeasurer(Measurer):
    """Measures this machine.

    Args:
        model: folder or name of the model.
        disk_dir: folder of the packed experts; None: the default.
        options: further arguments of ``vllm.LLM``.
        prompt_tokens: longer prompts are cut.
    """

    def __init__(self, model: str, disk_dir: Path | None, options: Mapping[str, Any], prompt_tokens: int) -> None:
        self._model, self._disk_dir, self._options, self._most = model, disk_dir, dict(options), prompt_tokens

    @contextlib.contextmanager
    def start(self, candidate: Candidate) -> Iterator[Engine]:
        job = self.job(candidate)
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
        if candidate.is_stock:
            environment["VLLM_PLUGINS"] = ""  # stock means that no line of the plugin is loaded

        def command(folder: Path) -> Sequence[str]:
            (folder / "job.json").write_text(json.dumps(job))
            return [sys.executable, "-P", "-m", _ENGINE, str(folder / "job.json")]

        try:
            process = LiveProcess(command, _TIMEOUT, environment)
        except LiveProcessError as error:
            raise MeasuringError(str(error)) from error
        with contextlib.closing(process):
            yield _Engine(process)

    def job(self, candidate: Candidate) -> dict:
        """Returns what ``engine`` is told."""
        spac: dict[str, Any] | None = None
        if candidate.knobs is not None:
            spac = {**candidate.knobs, "tuned": "off"}
            on_disk = spac.get("store", "disk") == "disk" and spac.get("execution", "slots") == "slots"
            if self._disk_dir is not None and on_disk:
                spac["disk_dir"] = str(self._disk_dir)
        return {
            "model": self._model,
            "spac": spac,
            "drafts": None if candidate.drafts is None else dict(candidate.drafts),
            "options": {**self._options, **candidate.options},
            "prompt_tokens": self._most,
        }


class _Engine(Engine):
    def __init__(self, process: LiveProcess) -> None:
        self._process = process
        facts = process.ready
        self.near_ties, self.repeats = facts["near_ties"], facts["repeats"]
        self.nbytes, self.exclusive = facts["nbytes"], facts["exclusive"]

    def answer(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        return Answer(**self._ask(prompt, tokens, explain=False))

    def explain(self, prompt: str | Sequence[int], tokens: int) -> Said:
        return Said.model_validate(self._ask(prompt, tokens, explain=True))

    def _ask(self, prompt: str | Sequence[int], tokens: int, explain: bool) -> Any:
        asked = prompt if isinstance(prompt, str) else list(prompt)
        try:
            return self._process.ask({"prompt": asked, "tokens": tokens, "explain": explain})
        except LiveProcessError as error:
            raise MeasuringError(str(error)) from error
