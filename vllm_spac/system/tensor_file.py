"""Reads and writes small safetensors files with metadata, such as trained predictors, which are not trusted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_spac.errors import ConfigError, brief
from vllm_spac.system import files
from vllm_spac.system.files import replacing
from vllm_spac.system.untrusted import parse_json, read_header


def read(
    path: Path, format: str, what: str, remedy: str, dtypes: Collection[str], *, trusted: bool = False
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata and the tensors of a file.

    Args:
        what: what such a file is, for errors.
        remedy: what to do if it is none.
        dtypes: element types that it may have, as safetensors writes them.
        trusted: refuse it if another user owns it or may write it: it decides what is computed.

    Raises:
        ConfigError: the file cannot be read, is refused, damaged, or of another format.
    """
    if trusted and (problem := files.refusal(path)):
        raise ConfigError(f"spac: {what} is refused: {problem}")
    try:
        metadata, entries = read_header(path)
        if metadata.get("format") != format:
            found = brief(metadata.get("format", "unknown"))
            raise ConfigError(f"spac: {path} is not {what} of format {format} but of {found}; {remedy}")
        check({entry["dtype"] for entry in entries.values()} <= set(dtypes), "it has tensors of other types")
        with safe_open(str(path), framework="pt") as file:
            return metadata, {name: file.get_tensor(name) for name in entries}
    except ConfigError:
        raise
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"spac: {path} cannot be read as {what}: {error}; {remedy}") from error


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file atomically; ``ConfigError`` when it cannot be written."""
    try:
        with replacing(path, by_name=True) as partial:
            save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"spac: {path} cannot be written: {error}; name another file") from error


def layer_names(text: str) -> tuple[str, ...]:
    """Parses a JSON list of the names of layers; ``ValueError`` if it is none."""
    names = parse_json(text)
    check(isinstance(names, list) and all(isinstance(name, str) for name in names), "layers are no list of names")
    check(0 < len(names) == len(set(names)), "a layer is named twice, or none is")
    return tuple(names)


def check(holds: bool, problem: str) -> None:
    """Raises ``ValueError(problem)`` unless ``holds``."""
    if not holds:
        raise ValueError(problem)
