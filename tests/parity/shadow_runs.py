"""Runs one engine with a shadow as draft model: `shadow_runs.py JSON` prints what came of it as JSON.

In a process of its own, see ``compare``. Beside ``engines.Run`` it prints what the shadow named, compared with what the
model's routers then chose.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import engines
import forked
import torch
from compare import TOY

import vllm_spac
from vllm_spac.cache.loader import LayerUse

TARGET = TOY / "target"


def shadowed(folder: Path, options: dict, **knobs) -> tuple[engines.Run, dict[str, int]]:
    """What an engine with a shadow says, and how right the shadow was."""
    spac = {"slots": "25%", "store": "disk", "disk_dir": str(folder), "guard": "off", "prefetch": "shadow"} | knobs
    asked = {"model": str(TARGET), "spac": spac, "options": options}
    found = forked.answer(forked.run([__file__, json.dumps(asked)]))
    heard = found.pop("heard")
    return engines.Run(**found), heard


class Listener:
    """Compares the guesses of each step that drafts were made for with the routing of its rows.

    Attributes:
        rows: rows of verify steps; ``read`` of them had a token that the draft model had read.
        pairs: experts that the routers chose for the rows read; ``right`` of them were named.
    """

    def __init__(self, runtime: Any) -> None:
        self.rows = self.read = self.pairs = self.right = 0
        self._named: torch.Tensor | None = None
        begin = runtime.begin_step

        def begun(step: Any) -> None:
            self._named = None if step.prompts or not any(each.drafts for each in step.requests) else step.draft
            if self._named is not None:
                self.rows += len(self._named)
                self.read += int((self._named[:, 0, 0] >= 0).sum())
            begin(step)

        runtime.begin_step = begun
        runtime.rerouter.listeners.append(self)

    def route(self, layer: int, hidden: Any, logits: Any, weights: Any, ids: torch.Tensor) -> None:
        if self._named is not None:
            named = self._named[:, layer]
            same = (named[:, :, None] == ids[:, None]) & (named[:, :, None] >= 0)
            self.right += int(same.sum())
            self.pairs += int((named >= 0).sum())

    def counts(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}


_heard: list[Listener] = []


def _listen(worker: Any) -> None:
    _heard.append(Listener(worker._spac_experts().runtime))


def main(asked: dict) -> dict:
    """An engine says what it says to ``engines.PROMPTS``."""
    spac, options = asked["spac"], asked["options"]
    LayerUse.counts = lambda *_: False  # else not all reads ahead are the shadow's
    prompts, max_tokens = options.pop("prompts", None), options.pop("max_tokens", 16)
    with engines.engine(asked["model"], spac, **options) as llm:
        llm.collective_rpc(_listen)
        tokens = engines.say(llm, prompts, max_tokens)
        [stats] = vllm_spac.stats(llm)["workers"]
    return asdict(engines.Run(tokens, stats, options["dtype"])) | {"heard": _heard[0].counts()}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
