"""Exceptions of the package; each message states a remedy."""

from __future__ import annotations

from vllm_spac.system.printable import printable


class SpacError(RuntimeError):
    """Base class of all errors that this package raises deliberately. The text is one line of printable characters."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(SpacError, ValueError):
    """A knob is unknown, malformed, or cannot be satisfied by this model or machine."""


class UnsupportedError(SpacError, ValueError):
    """The model, the vLLM version or a vLLM option cannot be served by the plugin."""


class StoreError(SpacError):
    """An expert cannot be written to, or read back from, the store exactly as it was packed."""
