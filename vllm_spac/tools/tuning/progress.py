"""What an unfinished ``vllm-spac tune`` has measured: a file that is replaced after each measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_spac.decisions.comparison import Said
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import make_folder, remove_leftovers, write_text, writing
from vllm_spac.system.machine import Machine
from vllm_spac.system.untrusted import read_text

FORMAT: Final = "spac-tuning-1"


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Measurement(_Kept):
    """One run of an engine.

    Attributes:
        rates: tokens per second of each prompt; empty: it failed.
        first_token: seconds to the first token of each prompt.
        said: answers of the default, with the second best tokens.
        near_ties: whether they may differ from the default's where two tokens are close.
        nbytes: host memory of the engine; ``exclusive``: whether no other can run beside it.
        seconds: of the whole run, with the start of its engine.
    """

    arm: str
    round: int
    rates: list[float] = []
    first_token: list[float] = []
    answers: list[list[int]] = []
    said: list[Said] = []
    near_ties: bool = False
    nbytes: int = 0
    exclusive: bool = False
    seconds: float
    problem: str = ""


class Turn(_Kept):
    """Tokens per second of the default and of ``arm``, for the same prompt.

    ``wrong``: the tokens differ, and not at a near-tie.
    """

    arm: str
    default: float
    other: float
    wrong: bool = False


class Progress(_Kept):
    """The measurements of a run, in order.

    Attributes:
        key: what they depend on: model, machine, versions, arguments.
        final: seconds spent in turns.
    """

    format: Literal["spac-tuning-1"] = FORMAT
    key: dict[str, Any]
    runs: list[Measurement] = []
    turns: list[Turn] = []
    final: float = 0.0


def key_of(identity: str, machine: Machine, versions: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what measurements depend on, as plain data."""
    found = {"model": identity, "machine": machine.model_dump(), "versions": versions, "arguments": arguments}
    return json.loads(json.dumps(found))


class ProgressFile:
    """The progress of one run in a file, named by the model and by everything that the measurements depend on."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        digest = xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())
        self.path = folder / f"tuning-{key['model']}-{digest}.json"
        self.content = Progress(key=key)

    def load(self) -> None:
        """Reads what an earlier process measured, if there is any.

        Raises:
            ConfigError: the file is damaged, or of something else.
        """
        again = "delete it, or add --fresh"
        try:
            found = Progress.model_validate_json(read_text(self.path))
        except FileNotFoundError:
            return
        except ValidationError as error:
            raise ConfigError(f"{self.path} is no unfinished tuning: {error.errors()[0]['msg']}; {again}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} cannot be read: {error}; {again}") from error
        if found.key != self.content.key:
            raise ConfigError(f"{self.path} belongs to another run; {again}")
        self.content = found

    def save(self) -> None:
        """Replaces the file; ``ConfigError`` if it cannot be written."""
        with writing(self.path, "name a folder with --disk-dir DIR"):
            make_folder(self.path.parent)
            remove_leftovers(self.path)
            text = self.content.model_dump_json() + "\n"
            write_text(self.path, text, durable=False)  # a sync would disturb the next measurement

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
