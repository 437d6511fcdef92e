"""What can go wrong, each with a message that says what to do."""

from __future__ import annotations

from vllm_spac.system.printable import printable


class SpacError(RuntimeError):
    """Base of all errors raised by this package on purpose. Its text is one line that a terminal can show."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(SpacError, ValueError):
    """A knob is unknown, malformed or cannot be met by this model or machine."""


class UnsupportedError(SpacError, ValueError):
    """The model, the vLLM version or a vLLM option cannot be served by the plugin."""


class StoreError(SpacError):
    """An expert cannot be written to, or read back from, the store exactly as it was packed."""
