"""Identifies the model and the versions that a tuned profile belongs to, without reading weights."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from vllm_spac.system.provenance import versions

_WEIGHTS = (".safetensors", ".bin", ".pt")
_VERSIONS = ("vllm", "vllm_spac", "torch")  # that decide speed


def identity(folder: Path) -> str:
    """Returns 32 hexadecimal digits that change with ``config.json`` and the names and sizes of the weight files.

    A profile decides speed and no token, so the weights themselves need not be the same.

    Raises:
        OSError: there is no ``config.json``, or the folder cannot be read.
    """
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.suffix in _WEIGHTS)
    config = (folder / "config.json").read_bytes()
    return xxhash.xxh3_128_hexdigest(config + json.dumps(files).encode())


def relevant_versions() -> dict[str, str]:
    """Returns the versions that a speed depends on; empty text for what is not installed."""
    found = versions()
    return {name: found[name] or "" for name in _VERSIONS}


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns ``vllm: 0.32.0, not 0.33.0`` for each version that differs."""
    differing = {name: text for name, text in then.items() if text != now.get(name)}
    return [f"{name}: {text or 'none'}, not {now.get(name) or 'none'}" for name, text in differing.items()]
