"""What a model's name stands for, where that is no checkpoint that can be read."""

from __future__ import annotations

from pathlib import Path

from vllm_spac.system.untrusted import open_file

_INSTEAD = "name a folder with config.json and *.safetensors, or a model of the Hugging Face hub"


def no_checkpoint(model: str) -> str:
    """Returns what ``model`` is and what to name instead; empty if it may be a checkpoint."""
    path = Path(model)
    if path.suffix.lower() == ".gguf" or (path.is_file() and _begins_as_gguf(path)):
        return f"{model} is a GGUF file, which is not read; {_INSTEAD}"
    if not path.is_dir() or (path / "config.json").exists() or (path / "params.json").exists():
        return ""
    if any(path.glob("*.gguf")):
        return f"{model} is a folder of GGUF files, which are not read; {_INSTEAD}"
    return f"{model} is a folder without config.json; download the checkpoint completely, or {_INSTEAD}"


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open_file(path) as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
