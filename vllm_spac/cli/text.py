"""What a command prints of files, models and servers."""

from __future__ import annotations

from rich.markup import escape

from vllm_spac.system.printable import printable


def shown(text: object) -> str:
    """For rich: markup and control characters in ``text`` are printed as they are written, not obeyed."""
    return escape(printable(text))
