"""Where the workers of an engine are: addresses, the secret, and who starts a worker again."""

from __future__ import annotations

import json
import re
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_spac.errors import ConfigError
from vllm_spac.system.printable import brief
from vllm_spac.system.untrusted import parse_json, read_text

CLUSTER_FILE = Path("~/.cache/vllm_spac/cluster.json")  # of vllm-spac cluster, unless another is named
ADDRESS = r"^tcp://[^\s/]{1,255}:[0-9]{1,5}$"


class Places(ABC):
    """The workers of one engine.

    Attributes:
        secret: what engines and workers prove to each other that they know.
    """

    secret: bytes

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns the address of each worker; those that this object starts are started now.

        Raises:
            SpacError: one cannot be started.
        """

    @abstractmethod
    def again(self, worker: int) -> str:
        """Returns the present address of a worker that was lost, started again if its process ended.

        Raises:
            SpacError: it cannot be started.
        """

    @abstractmethod
    def describe(self) -> str:
        """Returns a few words for the start-up line."""

    def close(self) -> None:
        """Ends what this object started."""


class Place(BaseModel):
    """A worker in a cluster's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(pattern=ADDRESS)
    pid: int = Field(ge=1)
    machine: str


class ClusterFile(BaseModel):
    """What ``vllm-spac cluster start`` writes: the workers that run, and their secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    workers: tuple[Place, ...] = Field(max_length=1024)

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """Reads and validates a file that only its owner can read; ``ConfigError`` if it is none."""
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise ConfigError(f"spac: {path} has the workers' secret and others can read it; run chmod 600 {path}")
            return cls.model_validate(parse_json(read_text(path)))
        except FileNotFoundError:
            raise ConfigError(f"spac: there is no cluster in {path}; run vllm-spac cluster start") from None
        except OSError as error:
            raise ConfigError(f"spac: cannot read {path}: {error.strerror}") from None
        except (ValueError, ValidationError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"spac: {path} is no file of vllm-spac cluster: {brief(str(error))}") from None

    def text(self) -> str:
        """Returns the content of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"


class RunningWorkers(Places):
    """Workers that run already, from a cluster's file, which is read again when one is lost.

    Args:
        path: of the file.
        count: number of workers to use; None: all.

    Raises:
        ConfigError: the file cannot be used, or has fewer workers.
    """

    def __init__(self, path: Path, count: int | None) -> None:
        self._path, self._count = path, count
        found = ClusterFile.read(path)
        self.secret = bytes.fromhex(found.secret)
        if not found.workers or (count is not None and len(found.workers) < count):
            raise ConfigError(
                f"spac: workers={count or 1} (--spac-workers), and {path} has {len(found.workers)} of them; start more "
                "with vllm-spac cluster start"
            )

    def addresses(self) -> list[str]:
        return [place.address for place in ClusterFile.read(self._path).workers[: self._count]]

    def again(self, worker: int) -> str:
        return self.addresses()[worker]

    def describe(self) -> str:
        machines = {re.sub(r"^tcp://(.*):\d+$", r"\1", address) for address in self.addresses()}
        return f"{len(self.addresses())} workers of {self._path} on {len(machines)} address(es)"
