"""One architecture in a process of its own: `one_family.py NAME FOLDER` prints what came of it, as JSON.

A tiny checkpoint is written into FOLDER; stock vLLM serves it, then the plugin with a quarter of its experts in slots.
Each is done by a fork of this process, which has imported vLLM: a second engine with speculative decoding in one
process does not survive (numba). A line is printed when each stage begins, so that a crash shows in which. The last
line is the verdict.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]

import engines  # noqa: E402
import stand_ins  # noqa: E402
import tiny_models  # noqa: E402
from exactness import first_difference  # noqa: E402

PROMPTS = engines.PROMPTS[:5]
# With an MTP head, vLLM's scheduler never starts a prompt that is longer than a forward (``engines``: 64 tokens).
SHORT = [prompt for prompt in engines.PROMPTS if len(prompt) < 64]
MAX_TOKENS = 12
SLOTS = "25%"


def attempt(architecture: str, folder: Path) -> tuple[str, str]:
    """Returns (verdict, detail); verdicts are those of ``families.VERDICTS``."""
    import warm  # noqa: F401
    from vllm.model_executor.models import registry

    # vLLM would inspect the model's class in a further process, whose imports take longer than both engines here.
    registry._run_in_subprocess = lambda inspect: inspect()
    stood_in = stand_ins.install(architecture)
    answers = folder / "answers"
    answers.mkdir()
    model = folder / "model"
    _begin("checkpoint")
    options = _apart(answers / "options", lambda: tiny_models.write(architecture, model))
    _begin("stock")
    stock = _apart(answers / "stock", lambda: _serve(model, None, options))
    if len({tuple(tokens) for tokens in stock["tokens"]}) < 4:
        return "checkpoint", "its tokens do not depend on the prompt, so equal tokens would show nothing"
    _begin("plugin")
    knobs = {"slots": SLOTS, "store": "disk", "disk_dir": str(folder / "packed"), "guard": "off"}
    run = _apart(answers / "plugin", lambda: _serve(model, knobs, options))
    if "refused" in run:
        return "refused", run["refused"]
    if (difference := first_difference(run["tokens"], stock["tokens"])) is not None:
        return "differs", difference
    slots, experts, loads = (run["stats"][name] for name in ("slots", "experts", "loads"))
    if loads < slots:
        return "checkpoint", f"its routers choose few experts: {loads} loads into {slots} slots show little"
    drafts = f", {run['stats']['steps']['verify']} steps with drafts" if "speculative_config" in options else ""
    head = run["stats"].get("mtp_head", {}).get("experts", 0)
    if head:
        of_head = run["stats"]["mtp_head"]
        drafts += f", of the head {of_head['slots']} of {head}, {of_head['loads']} loads"
    found = f"{slots} of {experts} experts in slots, {loads} loads{drafts}"
    return ("stood", f"{found}; stand-ins: {stood_in}") if stood_in else ("served", found)


def _serve(model: Path, knobs: dict | None, options: dict[str, Any]) -> dict[str, Any]:
    from vllm_spac.errors import SpacError

    prompts = SHORT if "speculative_config" in options else PROMPTS
    try:
        return asdict(engines.run(str(model), knobs, prompts, MAX_TOKENS, **options))
    except SpacError as error:
        return {"refused": str(error).removeprefix("spac: ")}


def _apart(answer: Path, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, which JSON can hold, computed by a fork of this process, which ends if that fails."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 1
        try:
            answer.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        sys.exit(status if status > 0 else 128 - status)
    return json.loads(answer.read_text())


def _begin(stage: str) -> None:
    print(json.dumps({"stage": stage}), flush=True)


if __name__ == "__main__":
    verdict, detail = attempt(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps({"verdict": verdict, "detail": detail}), flush=True)
