"""The profile that ``vllm-spac tune`` writes: knobs that were measured to be faster, for one model on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError
from vllm_spac.system.atomic_write import replacing
from vllm_spac.system.machine import Machine
from vllm_spac.system.private_files import make_folder
from vllm_spac.system.untrusted import read_text
from vllm_spac.tuning.candidate import MAY_SET, Departure, Knob, departures
from vllm_spac.tuning.comparison import Ratio
from vllm_spac.tuning.identity import changed

FORMAT: Final = "spac-tuned-1"
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


class TunedProfile(_Frozen):
    """A tuned profile.

    Attributes:
        model: as it was named; ``identity``: its content, as of ``identity.identity``.
        allowed: how ``knobs`` may depart from vLLM's tokens, as the user agreed when they were measured.
        choice: name of the candidate; ``default`` if none was faster.
        knobs: that ``vllm serve`` adds; ``speculative_config``: likewise. Both empty with ``default``.
        ratio: of the choice over the default, in turns; None if no candidate came to that.
        engine: further arguments of the engines that were measured.
        arguments: of the command, that decide what was measured.
    """

    format: Literal["spac-tuned-1"] = FORMAT
    model: str
    identity: str
    machine: Machine
    versions: dict[str, str]
    allowed: tuple[Departure, ...] = ()
    choice: str
    knobs: dict[str, Knob]
    speculative_config: dict[str, Any] | None = None
    ratio: Ratio | None = None
    measured: tuple[Measured, ...] = ()
    engine: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    command: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> TunedProfile:
        if odd := sorted(self.knobs.keys() - MAY_SET):
            raise ValueError(f"a tuned profile sets no {', '.join(odd)}")
        if found := sorted(departures(self.knobs) - set(self.allowed)):
            asked = " and ".join(self.allowed) or "exact"
            raise ValueError(f"its knobs are {' and '.join(found)}, and it was made for {asked} ones")
        SpacConfig.parse(self.knobs)
        return self

    @classmethod
    def read(cls, path: Path) -> TunedProfile:
        """Reads a profile; ``ConfigError`` if there is none, or it is none."""
        try:
            return cls.model_validate_json(read_text(path))
        except FileNotFoundError as error:
            raise ConfigError(f"there is no tuned profile {path}; make it with vllm-spac tune MODEL") from error
        except ValidationError as error:
            found = error.errors()[:3]
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in found)
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


def path_of(folder: Path, identity: str) -> Path:
    """Returns where the profile of a model is: beside its packed experts in ``folder``."""
    return folder / f"tuned-{identity}.json"
