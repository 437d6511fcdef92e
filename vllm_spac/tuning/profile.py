"""The profile that ``vllm-spac tune`` writes: knobs that were measured to be faster, for one model on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_spac import components
from vllm_spac.config import component_knobs
from vllm_spac.errors import ConfigError
from vllm_spac.system import ownership
from vllm_spac.system.atomic_write import replacing
from vllm_spac.system.machine import Machine
from vllm_spac.system.printable import brief
from vllm_spac.system.private_files import make_folder
from vllm_spac.system.untrusted import open_file, read_text
from vllm_spac.tuning.candidate import MAY_SET, Knob
from vllm_spac.tuning.comparison import Ratio
from vllm_spac.tuning.identity import changed

FORMAT: Final = "spac-tuned-2"
_MOST_BYTES = 1 << 20  # of a file: one of a hundred candidates has 50 KB
_AGAIN = "run vllm-spac tune again"


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Measured(_Frozen):
    """What was measured of one candidate.

    Attributes:
        speed: tokens per second over the default's, in the last round with both; None: it was not measured.
        tokens_per_second, first_token: medians of its last round, the latter in seconds.
        rounds: in how many it was measured.
        tokens: how its tokens compare with the default's.
        problem: why there is no speed.
    """

    name: str
    speed: float | None = None
    tokens_per_second: float | None = None
    first_token: float | None = None
    rounds: int = 0
    tokens: str = ""
    note: str = ""
    problem: str = ""


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


class TunedProfile(_Frozen):
    """A tuned profile.

    Attributes:
        model: as it was named; ``identity``: its content, as of ``identity.identity``.
        choice: name of the candidate; ``default`` if none was faster.
        knobs: that ``vllm serve`` adds; ``speculative_config``: likewise. Both empty with ``default``.
        ratio: of the choice over the default, in turns; None if no candidate came to that.
        files: xxh3_128 of the content of each file that a knob names.
        engine: further arguments of the engines that were measured.
        arguments: of the command, that decide what was measured.
    """

    format: Literal["spac-tuned-2"] = FORMAT
    model: str
    identity: str
    machine: Machine
    versions: dict[str, str]
    choice: str
    knobs: dict[str, Knob]
    speculative_config: dict[str, Any] | None = None
    ratio: Ratio | None = None
    measured: tuple[Measured, ...] = ()
    files: dict[str, str] = {}
    engine: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    command: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TunedProfile:
        if odd := sorted(self.knobs.keys() - MAY_SET):
            raise ValueError(f"a tuned profile sets no {', '.join(odd)}")
        for name, kind in component_knobs().items():
            value = self.knobs.get(name)
            if value is not None and value not in (*kind.others, *components.names(kind.family)):  # nothing is imported
                raise ValueError(f"{name}={brief(value)} is the name of no {kind.noun} of this package")
        if self.speculative_config is not None:
            Drafts.check(self.speculative_config)
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if type(self.engine.get(name, 1)) is not int:
                raise ValueError(f"{name} of its engine is no number")
        return self

    @classmethod
    def read(cls, path: Path) -> TunedProfile:
        """Reads a profile, and imports nothing that it names; ``ConfigError`` if there is none, or it is none.

        Also if another user owns it or may write it.
        """
        if problem := ownership.refusal(path):
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
        try:
            make_folder(path.parent)
            with replacing(path) as partial:
                partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; name a folder with --disk-dir DIR"
            ) from error

    def differences(self, machine: Machine, versions: dict[str, str]) -> list[str]:
        """Returns what has changed since: ``cores: 8, not 4`` of each property of the machine and each version."""
        return [*self.machine.differences(machine), *changed(self.versions, versions)]

    @property
    def keeps_default(self) -> bool:
        return not self.knobs and self.speculative_config is None


def digest(path: Path) -> str:
    """Returns xxh3_128 of a file's content; ``OSError`` if it cannot be read."""
    found = xxhash.xxh3_128()
    with open_file(path) as file:
        while block := file.read(_MOST_BYTES):
            found.update(block)
    return found.hexdigest()


def digests(knobs: Mapping[str, Knob]) -> dict[str, str]:
    """Returns the digest of each file that ``knobs`` name, by its path; ``OSError`` if one cannot be read."""
    named = knobs.get("predictor_file")
    return {} if named is None else {str(named): digest(Path(str(named)))}


def _listed(error: ValidationError, whole: str) -> str:
    """The first problems in one line; ``whole``: what one of no field in particular is of."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:3]
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or whole}: {each['msg']}" for each in found)


def path_of(folder: Path, identity: str) -> Path:
    """Returns where the profile of a model is: beside its packed experts in ``folder``."""
    return folder / f"tuned-{identity}.json"
