"""The profile that ``vllm-spac tune`` writes: knobs that were measured to be faster, for one model on one machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_spac.config.config import component_knobs
from vllm_spac.decisions.comparison import Ratio
from vllm_spac.errors import ConfigError, brief
from vllm_spac.system import files
from vllm_spac.system.files import prepare_folder, write_text, writing
from vllm_spac.system.machine import Machine, versions
from vllm_spac.system.untrusted import read_text

Knob = str | int | float | bool
DEFAULT = "default"  # the name of the variant without changes

# Knobs that variants, and so a tuned profile, may set: those that decide speed, and none that writes anything.
MAY_SET = frozenset({"slots", "store", "policy", "prefetch", "guard", "cpu_experts", "io_threads"})


def rounds(knobs: Mapping[str, Any]) -> bool:
    """Whether with these tokens are vLLM's up to rounding only."""
    return str(knobs.get("cpu_experts", "off")) != "off"


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


FORMAT: Final = "spac-tuned-4"
_MOST_BYTES = 1 << 20  # of a file
_AGAIN = "run vllm-spac tune again"


class Drafts(BaseModel):
    """What a profile may say of drafts, of vLLM's ``speculative_config``: no class, no code, nothing that is lossy."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model", "medusa", "mlp_speculator"]
    model: str | None = None
    num_speculative_tokens: int | None = Field(None, ge=1, le=1024)
    prompt_lookup_max: int | None = Field(None, ge=1, le=1024)
    prompt_lookup_min: int | None = Field(None, ge=1, le=1024)
    draft_tensor_parallel_size: int | None = Field(None, ge=1, le=1024)
    max_model_len: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Drafts:
        if self.model is None and self.method not in ("ngram", "mtp"):
            raise ValueError(f"drafts of {self.method} need a model")
        return self

    @classmethod
    def check(cls, config: dict[str, Any]) -> None:
        """Raises ``ValueError``, in one line, if a profile may not say ``config``."""
        try:
            cls.model_validate(config)
        except ValidationError as error:
            raise ValueError(_listed(error, "drafts")) from None


class TunedProfile(BaseModel):
    """A tuned profile.

    Attributes:
        knobs: that ``vllm serve`` adds; ``speculative_config``: likewise. Both empty with ``default``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["spac-tuned-4"] = FORMAT
    model: str  # as it was named; ``identity``: its content, as of ``identity``
    identity: str
    machine: Machine
    versions: dict[str, str]
    choice: str  # name of the variant; ``default`` if none was faster
    knobs: dict[str, Knob]
    speculative_config: dict[str, Any] | None = None
    ratio: Ratio | None = None  # of the choice over the default, in turns; None if no variant came to that
    engine: dict[str, Any] = {}  # further arguments of the engines that were measured
    command: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TunedProfile:
        if odd := sorted(self.knobs.keys() - MAY_SET):
            raise ValueError(f"a tuned profile sets no {', '.join(odd)}")
        for name, kind in component_knobs().items():
            value = self.knobs.get(name)
            if value is not None and not kind.is_ours(value):  # nothing is imported
                raise ValueError(f"{name}={brief(value)} is the name of no {kind.noun} of this package")
        if self.speculative_config is not None:
            Drafts.check(self.speculative_config)
        if type(self.engine.get("tensor_parallel_size", 1)) is not int:
            raise ValueError("tensor_parallel_size of its engine is no number")
        return self

    @classmethod
    def read(cls, path: Path) -> TunedProfile:
        """Reads a profile, and imports nothing that it names; ``ConfigError`` if there is none, or it is none.

        Also if another user owns it or may write it.
        """
        if problem := files.refusal(path):
            raise ConfigError(problem)
        try:
            return cls.model_validate_json(read_text(path, _MOST_BYTES))
        except FileNotFoundError as error:
            raise ConfigError(f"there is no tuned profile {path}; make it with vllm-spac tune MODEL") from error
        except ValidationError as error:
            problems = _listed(error, "file")
            raise ConfigError(f"{path} is no tuned profile of format {FORMAT}: {problems}; {_AGAIN}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tuned profile {path} cannot be read: {error}; {_AGAIN}") from error

    def write(self, path: Path) -> None:
        """Writes the profile atomically; ``ConfigError`` if it cannot be written."""
        with writing(path, "name a folder with --disk-dir DIR"):
            prepare_folder(path.parent)
            write_text(path, self.model_dump_json(indent=1) + "\n")

    def differences(self, machine: Machine, versions: dict[str, str]) -> list[str]:
        """Returns what has changed since: ``cores: 8, not 4`` of each property of the machine and each version."""
        return [*self.machine.differences(machine), *changed(self.versions, versions)]

    @property
    def keeps_default(self) -> bool:
        return not self.knobs and self.speculative_config is None


def _listed(error: ValidationError, whole: str) -> str:
    """The first problems in one line; ``whole``: what one of no field in particular is of."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:3]
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or whole}: {each['msg']}" for each in found)


def path_of(folder: Path, identity: str) -> Path:
    """Returns where the profile of a model is: beside its packed experts in ``folder``."""
    return folder / f"tuned-{identity}.json"
