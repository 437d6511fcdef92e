"""An entry point of ``vllm.platform_plugins`` that is no platform: vLLM calls it before it imports what can fail."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_spac.system.flaws import flaws


def check() -> None:
    """Ends the ``vllm`` command in one line where it would end in a traceback a moment later.

    Returns None, which tells vLLM that this is no platform. Programs that import vLLM are left alone: they do not need
    the command's metadata.
    """
    if Path(sys.argv[0]).name != "vllm":
        return
    for flaw in flaws():
        raise SystemExit(f"vllm: error: {flaw.text}; run: vllm-spac check --fix")
