"""One architecture in a process of its own: `one_family.py NAME FOLDER` prints what came of it, as JSON.

A tiny checkpoint is written into FOLDER; stock vLLM serves it, then the plugin with a quarter of its experts in slots.
A line is printed when each stage begins, so that a process which crashes shows in which. The last line is the verdict.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]

import compare  # noqa: E402
import engines  # noqa: E402
import tiny_models  # noqa: E402
from exactness import first_difference  # noqa: E402

PROMPTS = engines.PROMPTS[:5]
# With an MTP head, vLLM's scheduler never starts a prompt that is longer than a forward (``engines``: 64 tokens).
SHORT = [prompt for prompt in engines.PROMPTS if len(prompt) < 64]
MAX_TOKENS = 12
SLOTS = "25%"


def attempt(architecture: str, folder: Path) -> tuple[str, str]:
    """Returns (verdict, detail); verdicts are those of ``families.VERDICTS``."""
    from vllm_spac.errors import SpacError

    _begin("checkpoint")
    options = tiny_models.write(architecture, folder)
    _begin("stock")
    stock = _serve(folder, None, options)
    if len({tuple(tokens) for tokens in stock.tokens}) < 4:
        return "checkpoint", "its tokens do not depend on the prompt, so equal tokens would show nothing"
    _begin("plugin")
    knobs = {"slots": SLOTS, "store": "disk", "disk_dir": str(folder / "packed"), "guard": "off"}
    try:
        run = _serve(folder, knobs, options)
    except SpacError as error:
        return "refused", str(error).removeprefix("spac: ")
    if (difference := first_difference(run.tokens, stock.tokens)) is not None:
        return "differs", difference
    slots, experts, loads = (run.stats[name] for name in ("slots", "experts", "loads"))
    if loads < slots:
        return "checkpoint", f"its routers choose few experts: {loads} loads into {slots} slots show little"
    return "served", f"{slots} of {experts} experts in slots, {loads} loads"


def _serve(folder: Path, knobs: dict | None, options: dict[str, Any]) -> engines.Run:
    if "speculative_config" in options:  # one engine per process, see ``compare``
        return compare.compare(folder, [knobs], prompts=SHORT, max_tokens=MAX_TOKENS, **options)[0]
    return engines.generate(str(folder), knobs, PROMPTS, MAX_TOKENS, **options)


def _begin(stage: str) -> None:
    print(json.dumps({"stage": stage}), flush=True)


if __name__ == "__main__":
    verdict, detail = attempt(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps({"verdict": verdict, "detail": detail}), flush=True)
