"""Escapes untrusted text from files, models and servers for printing."""

from __future__ import annotations

from rich.markup import escape

from vllm_spac.system.printable import printable


def shown(text: object) -> str:
    """Escapes ``text`` for rich: markup and control characters are printed literally, not interpreted."""
    return escape(printable(text))
