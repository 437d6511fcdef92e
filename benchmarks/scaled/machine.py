"""The scaled machine's rates, in a file that its store and its executor read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.errors import ConfigError
from vllm_spac.system.untrusted import read_text

VARIABLE = "SCALED_MACHINE"
_INSTEAD = "start engines by benchmarks/scaled/run.py, or name a file of benchmarks/scaled/machine.py:ScaledMachine"


class ScaledMachine(BaseModel):
    """A real machine whose seconds have been multiplied by one factor.

    Attributes:
        memory_seconds: seconds of host memory per expert, loaded or computed; 0: the two do not slow each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["scaled-machine-1"] = "scaled-machine-1"
    machine: str = Field(min_length=1)  # name of the real one
    expert_bytes: int = Field(gt=0)  # bytes of an expert here
    layer_seconds: float = Field(gt=0)  # measured seconds of a layer here, with all experts resident
    load_seconds: float = Field(gt=0)  # seconds of an expert on the link
    cpu_seconds: float = Field(gt=0)  # seconds of an expert on the CPU, for as many rows as it computes in this time
    memory_seconds: float = Field(0.0, ge=0)
    core: int = Field(ge=0)  # CPU that loads and computes experts; the forward has another one

    @property
    def link_bytes_per_second(self) -> float:
        """Rate of the link."""
        return self.expert_bytes / self.load_seconds

    @property
    def memory_bytes_per_second(self) -> float:
        """Rate of host memory."""
        return self.expert_bytes / self.memory_seconds if self.memory_seconds else math.inf

    @classmethod
    def of_environment(cls, expert_bytes: int) -> ScaledMachine:
        """Reads the file that the environment variable ``SCALED_MACHINE`` names.

        Raises:
            ConfigError: it is not set, the file is no scaled machine, or it is for experts of another size.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            raise ConfigError(f"{VARIABLE} is not set, which names the rates of the scaled machine; {_INSTEAD}")
        found = cls.read(path)
        if found.expert_bytes != expert_bytes:
            raise ConfigError(
                f"{VARIABLE}={path} is for experts of {found.expert_bytes} bytes, and these have {expert_bytes}; "
                f"{_INSTEAD}"
            )
        return found

    @classmethod
    def read(cls, path: str | Path) -> ScaledMachine:
        """Reads a file; ``ConfigError``: it cannot be read, or is no scaled machine."""
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:3])
            raise ConfigError(f"{VARIABLE}={path} is no scaled machine: {problems}; {_INSTEAD}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{VARIABLE}={path} cannot be read: {error}; {_INSTEAD}") from error
